"""Parsing of OpenAI API responses, shared by several commands."""

from __future__ import annotations

from typing import Any

from surestep_common.errors import InvalidRequest

DONE = b"[DONE]"  # the payload at the end of a stream
_DATA = b"data:"


def payload_of(line: bytes) -> bytes | None:
    """Return the payload of a line of an event stream; None for a line without one."""
    return line[len(_DATA) :].strip() if line.startswith(_DATA) else None


def model_card(models: Any, name: str | None = None) -> dict[str, Any]:
    """Return the model called `name`, or the first one, of a GET /v1/models response.

    Raise InvalidRequest.
    """
    listed = models.get("data") if isinstance(models, dict) else None
    cards = [card for card in listed or () if isinstance(card, dict) and "id" in card]
    for card in cards:
        if name in (None, card["id"]):
            return card
    if name is None:
        raise InvalidRequest("no model is served")
    known = ", ".join(str(card["id"]) for card in cards)
    raise InvalidRequest(f"no model {name!r} is served: {known or 'there is none'}")
