"""Outputs in Harmony, and the ways to read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from support.checkpoints import tiny_tokenizer
from surestep_gateway.generation.detokenize import Detokenizer, StopScanner, TextAssembler
from surestep_gateway.parsers import Event, OutputParser, coalesce
from surestep_gateway.parsers.harmony import HarmonyParser
from surestep_gateway.text.tokenizer import Tokenizer

PROMPT = "<|start|>user<|message|>hello<|end|><|start|>assistant"
MARKS = HarmonyParser.structure
_MARK = re.compile(f"({'|'.join(map(re.escape, MARKS))})")


class Read(NamedTuple):
    """What became of an output."""

    events: list[Event]
    reasoning_tokens: int | None
    num_tokens: int  # fewer than there were where a stop string ended the output
    stop: str | None


@cache
def tokenizer() -> Tokenizer:
    """The tiny tokenizer, with the special tokens of the format."""
    return Tokenizer(tiny_tokenizer.build(*MARKS))


def split(output: str) -> list[str]:
    """The special tokens in a text and what is between them."""
    return [part for part in _MARK.split(output) if part]


def ids_of(parts: Iterable[str]) -> list[int]:
    """Ids of special tokens, and of text between them that may be spelled like one."""
    return [id_ for part in parts for id_ in _ids(part)]


def _ids(part: str) -> Iterator[int]:
    found = tokenizer().id(part) if part in MARKS else None
    if found is not None:
        yield found
        return
    for _, run in groupby(part, key=lambda char: char == "<"):  # no marker in a run
        yield from tokenizer().encode_now("".join(run), add_special_tokens=False)


def read(
    output: str | Sequence[int],
    *,
    runs: Iterable[Sequence[int]] | None = None,
    prompt: str = PROMPT,
    tools: Sequence[str] = ("weather", "book"),
    stops: Sequence[str] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    ended: bool = True,
) -> Read:
    """Read ids, or a text whose markers are special tokens; `runs` are those ids in pieces."""
    ids = ids_of(split(output)) if isinstance(output, str) else list(output)
    parser = OutputParser(HarmonyParser(prompt, tools))
    assembler = TextAssembler(
        Detokenizer(tokenizer(), skip_special_tokens=True),
        StopScanner(stops, include_stop=include_stop),
        parser,
        min_tokens=min_tokens,
        include_stop=include_stop,
        structure={i: mark for mark in parser.structure if (i := tokenizer().id(mark)) is not None},
    )
    events: list[Event] = []
    num_tokens = 0
    pieces = list(runs) if runs is not None else [[id_] for id_ in ids]
    for number, run in enumerate(pieces, start=1):
        last = ended and number == len(pieces)
        piece = assembler.push(run, ended=last, stop_token=False)
        events += piece.events
        num_tokens += len(piece.token_ids)
        if piece.stop is not None:
            return Read(coalesce(events), assembler.num_reasoning_tokens, num_tokens, piece.stop)
    return Read(coalesce(events), assembler.num_reasoning_tokens, num_tokens, None)
