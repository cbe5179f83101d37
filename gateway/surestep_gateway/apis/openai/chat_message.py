"""The message of a chat choice, whole and in deltas."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    coalesce,
)

Json = dict[str, Any]


def message_delta(events: Sequence[Event]) -> Json:
    """Return the `delta` of a chunk. Each call has one entry, its id and name in its first chunk.

    Reasoning has two names: `reasoning` is vLLM's current one, `reasoning_content` the one that
    most clients were written for.
    """
    delta: Json = {}
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case Reasoning(text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case ToolCallStart(index, name):
                calls[index] = _new_call(index, name)
            case ToolArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _new_call(index: int, name: str) -> Json:
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def whole_message(events: Sequence[Event], role: str, *, reasoning: bool) -> Json:
    """Return the `message`. With `reasoning` its keys are present, null where there was none."""
    delta = message_delta(coalesce(events))
    message: Json = {"role": role, "content": delta.get("content"), "refusal": None}
    if reasoning:
        thought = delta.get("reasoning")
        message |= {"reasoning": thought, "reasoning_content": thought}
    if "tool_calls" in delta:
        message["tool_calls"] = [_without_index(call) for call in delta["tool_calls"]]
    elif not delta:  # an empty answer is no missing one
        message["content"] = ""
    return message


def _without_index(call: Json) -> Json:
    return {key: value for key, value in call.items() if key != "index"}
