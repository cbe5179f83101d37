"""What answers of the OpenAI API are read for by more than one command."""

from __future__ import annotations

from typing import Any

from surestep_common.errors import InvalidRequest

DONE = b"[DONE]"  # the payload at the end of a stream
_DATA = b"data:"


def payload_of(line: bytes) -> bytes | None:
    """What a line of a stream of events carries; None of a line that carries nothing."""
    return line[len(_DATA) :].strip() if line.startswith(_DATA) else None


def model_card(models: Any, name: str | None = None) -> dict[str, Any]:
    """The model called `name`, or the first one, in an answer to GET /v1/models.

    Raises InvalidRequest.
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
