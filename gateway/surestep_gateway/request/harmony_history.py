"""Conversations as the chat template of gpt-oss takes them.

It knows less than the API: one message of instructions, at the beginning; one call in a message,
which the tool results behind it answer; reasoning or content beside a call, but not both. What it
does not know it leaves out or refuses. Which reasoning of earlier turns the model still sees is the
template's business: between calls it is kept, and dropped once there was an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from surestep_common.errors import InvalidRequest

Message = dict[str, Any]

EFFORTS = ("low", "medium", "high")
_INSTRUCTING = ("system", "developer")


def harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages, in the form that templates expect, without what this template lacks."""
    instructions = [one for one in messages if one["role"] in _INSTRUCTING]
    others = [one for one in messages if one["role"] not in _INSTRUCTING]
    shown: list[Message] = []
    if instructions:
        text = "\n\n".join(one["content"] for one in instructions if one["content"])
        shown.append(instructions[0] | {"content": text})
    for at, message in enumerate(others):
        if message["role"] == "assistant":
            shown += _answer(message, _results(others, at))
        elif message["role"] != "tool" or not _is_placed(others, at):
            shown.append(message)
    return shown


def harmony_tools(tools: Sequence[Message] | None) -> list[Message] | None:
    """Return tools that all have a description, which the template adds to other text."""
    if tools is None:
        return None
    return [
        tool
        | {
            "function": tool["function"]
            | {"description": tool["function"].get("description") or ""}
        }
        for tool in tools
    ]


def check_effort(effort: Any) -> None:
    """Raise InvalidRequest for an effort that the model was not trained with."""
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(
            f"'reasoning_effort' must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]} for this model",
            param="reasoning_effort",
        )


def _results(messages: Sequence[Message], at: int) -> list[Message]:
    """Return the tool messages directly behind an answer."""
    return list(takewhile(lambda one: one["role"] == "tool", messages[at + 1 :]))


def _is_placed(messages: Sequence[Message], at: int) -> bool:
    """Return whether a tool message is a result behind calls, and shown with them."""
    before = next((one for one in reversed(messages[:at]) if one["role"] != "tool"), None)
    return before is not None and bool(before.get("tool_calls")) and before["role"] == "assistant"


def _answer(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield an answer of the assistant, its calls one by one and each before its results."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls")
    if not calls:
        if message["content"]:  # what was cut off in its reasoning is no answer
            yield message | ({"thinking": thought} if thought else {})
        return
    thinking = "\n\n".join(text for text in (thought, message["content"]) if text)
    ids = [call.get("id") for call in calls]
    callers = [
        ids.index(result.get("tool_call_id")) if result.get("tool_call_id") in ids else at
        for at, result in enumerate(results)
    ]
    for at, call in enumerate(calls):
        yield message | {"content": "", "thinking": "" if at else thinking, "tool_calls": [call]}
        last = at == len(calls) - 1
        for caller, result in zip(callers, results, strict=True):
            if caller == at or (last and caller > at):
                yield result
