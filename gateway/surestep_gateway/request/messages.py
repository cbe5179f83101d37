"""Messages as chat templates take them: parts as text, and roles that they know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from surestep_common.errors import InvalidRequest, UnsupportedParameter

from surestep_gateway.text.chat_template import ChatTemplate

Part = dict[str, Any]
Message = dict[str, Any]

_TEXT_PARTS = {  # types of parts, and where their text is; the last two are those of Responses
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}
_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # of earlier answers
# Orders of messages that some templates refuse, or lose.
_LATE = ("system", "system", "user", "assistant", "system", "user")
_NEIGHBOURS = ("user", "user", "assistant", "user")
_TYPE_CHARS = 32  # shown of an unknown type


def text_part(part: Part, param: str) -> str:
    """Return the text of a part, which needs no type. Raise InvalidRequest naming `param`."""
    kind = part.get("type") or "text"
    if kind in _THOUGHTS:
        return _thought(part)
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise UnsupportedParameter(
            f"{param}: only parts of type 'text' are supported, not {str(kind)[:_TYPE_CHARS]!r}",
            param=param,
        )
    field = _TEXT_PARTS[kind]
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{field} must be a string", param=f"{param}.{field}")
    return text


def result_part(part: Part) -> str:
    """Return a part of a tool's result as text, or what was left out.

    Nothing is refused: the client cannot take the result back, and its session would be over.
    """
    kind = part.get("type") or "text"
    field = _TEXT_PARTS.get(kind, "text") if isinstance(kind, str) else "text"
    inner = part.get("content")
    if isinstance(text := part.get(field), str):
        return text
    if isinstance(inner, list):  # of a search result, or a document
        return "\n".join(result_part(one) for one in inner if isinstance(one, dict))
    if isinstance(name := part.get("tool_name"), str):  # a reference to a tool
        return name
    return f"[{str(kind)[:_TYPE_CHARS]} left out: only text is read here]"


def of_results(roles: Iterable[str]) -> list[bool]:
    """Return which messages hold what tools returned, by the roles of all.

    A message of the user between a result and the answer to it is one of them: results of chats are
    texts, so that a client puts a picture that a tool read there.
    """
    found = [False]
    for role in roles:
        found.append(role == "tool" or (found[-1] and role == "user"))
    return found[1:]


def without_thoughts(parts: Sequence[Part]) -> tuple[list[Part], str]:
    """Return the other parts of an answer, and the text of its reasoning."""
    thoughts = [_thought(part) for part in parts if part.get("type") in _THOUGHTS]
    rest = [part for part in parts if part.get("type") not in _THOUGHTS]
    return rest, "\n".join(filter(None, thoughts))


def _thought(part: Part) -> str:
    """Return reasoning, by any of its names; empty where only its author can read it."""
    for key in ("thinking", "reasoning", "text", "content", "summary"):
        value = part.get(key)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            texts = [one.get("text") for one in value if isinstance(one, dict)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def with_known_roles(
    messages: Sequence[Message], template: ChatTemplate, *, tools: bool, source: str | None
) -> list[Message]:
    """Return messages whose instructions the template reads.

    `developer` is `system` to a template without that role. Where it wants one system message, at
    the beginning, all of them become that one. Where roles must alternate, neighbouring messages
    of the user become one.
    """
    known = template.knows_developer(tools=tools, source=source)
    named = [
        message | {"role": "system"} if message["role"] == "developer" and not known else message
        for message in messages
    ]
    if any(message["role"] == "system" for message in named[1:]) and not template.reads(
        _LATE, tools=tools, source=source
    ):
        instructions = [message for message in named if message["role"] == "system"]
        others = [message for message in named if message["role"] != "system"]
        named = [_joined(instructions), *others]
    runs = [(role, list(run)) for role, run in groupby(named, key=lambda one: one["role"])]
    if any(role == "user" and len(run) > 1 for role, run in runs) and not template.reads(
        _NEIGHBOURS, tools=tools, source=source
    ):
        parted = ([_joined(run)] if role == "user" else run for role, run in runs)
        named = [message for run in parted for message in run]
    return named


def _joined(messages: Sequence[Message]) -> Message:
    """Return one message: one text, a part of its own where templates go through parts."""
    texts, in_parts = [], False
    for content in (message["content"] for message in messages):
        in_parts |= isinstance(content, list)
        texts += [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    text = "\n\n".join(filter(None, texts))
    return messages[0] | {"content": [{"type": "text", "text": text}] if in_parts else text}
