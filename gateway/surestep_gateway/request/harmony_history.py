"""Conversations as the chat template of gpt-oss takes them.

It knows less than the API: one message of instructions, at the beginning; one call in a message,
which the tool results behind it answer; reasoning or content beside a call, but not both. What it
does not know it leaves out or refuses. Which reasoning of earlier turns the model still sees is the
template's business: between calls it is kept, and dropped once there was an answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from surestep_common.errors import InvalidRequest

from surestep_gateway.text.chat_template import INSTRUCTING

Message = dict[str, Any]

_EFFORTS = ("low", "medium", "high")


def harmony_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages, in the form that templates expect, without what this template lacks."""
    instructions = [one for one in messages if one["role"] in INSTRUCTING]
    others = [one for one in messages if one["role"] not in INSTRUCTING]
    shown: list[Message] = []
    if instructions:
        text = "\n\n".join(one["content"] for one in instructions if one["content"])
        shown.append(instructions[0] | {"content": text})
    at = 0
    while at < len(others):
        message, at = others[at], at + 1
        if message["role"] != "assistant":
            shown.append(message)
        elif message.get("tool_calls"):
            results = list(takewhile(lambda one: one["role"] == "tool", others[at:]))
            at += len(results)
            shown += _calls(message, results)
        elif message["content"] or at == len(others):  # cut off in its reasoning it is no answer
            thought = _thought(message)
            shown.append(message | ({"thinking": thought} if thought else {}))
    return shown


def harmony_tools(tools: Sequence[Message] | None) -> list[Message] | None:
    """Return tools that all have a description, which the template adds to other text."""
    return [_described(tool) for tool in tools] if tools is not None else None


def check_effort(effort: Any) -> None:
    """Raise InvalidRequest for an effort that the model was not trained with."""
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequest(
            "'reasoning_effort' must be low, medium or high for this model",
            param="reasoning_effort",
        )


def _calls(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield the calls of an answer one by one, each before its results."""
    calls = message["tool_calls"]
    of_call: dict[int, list[Message]] = defaultdict(list)
    for caller, result in zip(_callers(calls, results), results, strict=True):
        of_call[caller].append(result)
    thinking = "\n\n".join(text for text in (_thought(message), message["content"]) if text)
    for at, call in enumerate(calls):
        yield message | {"content": "", "thinking": "" if at else thinking, "tool_calls": [call]}
        yield from of_call[at]


def _callers(calls: Sequence[Message], results: Sequence[Message]) -> list[int]:
    """Return which call each result is of: the one with its id, or the one in its place."""
    ids = [str(call.get("id")) for call in calls]
    counts = Counter(ids)
    named = {id_: at for at, id_ in enumerate(ids) if counts[id_] == 1}
    last = len(calls) - 1
    return [
        named.get(str(result.get("tool_call_id", "")), min(at, last))
        for at, result in enumerate(results)
    ]


def _thought(message: Message) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _described(tool: Message) -> Message:
    function = tool["function"]
    return tool | {"function": function | {"description": function.get("description") or ""}}
