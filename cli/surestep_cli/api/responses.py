"""Parsing of OpenAI API responses, shared by several commands."""

from __future__ import annotations

import json
from typing import Any

from surestep_common.errors import InvalidRequest


def message_of(body: Any) -> str:
    """Return the message of an OpenAI API error, with its parameter."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return str(error or body)
    param = f" ({error['param']})" if error.get("param") else ""
    return f"{error.get('message')}{param}"


def message_in(text: str) -> str:
    """Return the message of an error's body, which may be no JSON."""
    try:
        return message_of(json.loads(text))
    except ValueError:
        return text.strip()


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
