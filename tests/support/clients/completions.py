"""Completions of the official client, and what becomes of one when something is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from openai import OpenAI
from openai.types import Completion
from support.processes.stack import Stack

_DISTURBED_AFTER = 8  # chunks


class Told(NamedTuple):
    """All that a stream said; ids where they were asked for."""

    text: str
    ids: list[int]


def client_of(stack: Stack) -> OpenAI:
    """The official client, which must not need a second try."""
    return OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=90)


def read(stream: Iterable[Completion], disturb: Callable[[], object] | None = None) -> Told:
    """Read a stream to its end; after some chunks `disturb` is called, once."""
    told, chunks = Told("", []), 0
    for chunk in stream:
        for choice in chunk.choices:
            ids = getattr(choice, "token_ids", None) or []
            told = Told(told.text + choice.text, told.ids + ids)
        chunks += 1
        if chunks == _DISTURBED_AFTER and disturb is not None:
            disturb()
    assert chunks > _DISTURBED_AFTER, "it was over before anything happened"
    return told
