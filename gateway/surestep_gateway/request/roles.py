"""Roles as chat templates know them, which may lack a name or a place of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surestep_gateway.text.chat_template import ChatTemplate

Message = dict[str, Any]


def with_known_roles(
    messages: Sequence[Message], template: ChatTemplate, *, tools: bool, source: str | None
) -> list[Message]:
    """Return messages whose instructions the template reads.

    `developer` is `system` to a template without that role. Where it wants one system message, at
    the beginning, all of them become that one.
    """
    known = template.knows_developer(tools=tools, source=source)
    named = [
        message | {"role": "system"} if message["role"] == "developer" and not known else message
        for message in messages
    ]
    instructions = [message for message in named if message["role"] == "system"]
    if not any(message["role"] == "system" for message in named[1:]):
        return named
    if template.keeps_late_instructions(tools=tools, source=source):
        return named
    others = [message for message in named if message["role"] != "system"]
    return [instructions[0] | {"content": _joined(instructions)}, *others]


def _joined(messages: Sequence[Message]) -> str | list[Message]:
    """Return the contents as one text, a part of its own where templates go through parts."""
    texts, in_parts = [], False
    for content in (message["content"] for message in messages):
        in_parts |= isinstance(content, list)
        texts += [content] if isinstance(content, str) else [part["text"] for part in content]
    text = "\n\n".join(filter(None, texts))
    return [{"type": "text", "text": text}] if in_parts else text
