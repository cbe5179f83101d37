"""Conversations as the chat templates of Kimi K2 take them.

They show the id of a call and not the name of its function: the model writes `functions.NAME:INDEX`
for an id, with an index that counts the calls of the conversation. Clients have other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KIMI_CALLS = "kimi_k2"  # the parser of the format


def name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give calls the ids that the model would write, and results those of their calls."""
    count = 0
    ids: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            given = call.get("id")
            call["id"] = ids[given] = f"functions.{call['function']['name']}:{count}"
            count += 1
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            message["tool_call_id"] = ids.get(given, given)
