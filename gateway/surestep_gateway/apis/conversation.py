"""Conversations of other APIs as messages of a chat, and the fields that a chat has too."""

from __future__ import annotations

from typing import Any

from surestep_common.errors import InvalidRequest

from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.request.protocol import SamplingBody
from surestep_gateway.request.unsupported import UNSUPPORTED

Json = dict[str, Any]
INSTRUCTING = ("system", "developer")

# Fields of a chat by the same names: what constrains it is obeyed, what it refuses is refused.
_SHARED = StructuredBody.model_fields.keys() | UNSUPPORTED


def shared_fields(body: SamplingBody, response_format: Json | None, place: str) -> Json:
    """Return the fields of a body that a chat has too. Raise InvalidRequest.

    `response_format` is what the body has for it at `place`.
    """
    extra = body.model_extra or {}
    given: Json = {
        name: getattr(body, name)
        for name in SamplingBody.model_fields.keys() & body.model_fields_set
    }
    given |= {name: extra[name] for name in _SHARED & extra.keys()}
    if response_format is None:
        return given
    if given.get("response_format") is not None:
        raise InvalidRequest(
            f"'{place}' and 'response_format' both say what the output must be", param=place
        )
    return given | {"response_format": response_format}


class Conversation:
    """The messages of a chat, made of what was said, thought and called, in order.

    Reasoning, text and calls of the assistant become one message as long as they come in this
    order. Instructions at the beginning become one message, of the role that all templates know.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._answer: Json | None = None  # of the assistant, open for more
        self.after_result = False  # nothing of the assistant's or the system's since then

    def instruct(self, text: str) -> None:
        """Add instructions."""
        self._answer, self.after_result = None, False
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            text = "\n\n".join(part for part in (self.messages.pop()["content"], text) if part)
        self.messages.append({"role": "system", "content": text})

    def say(self, role: str, content: str | list[Json]) -> None:
        """Add a message of the user, or of another role but the assistant's."""
        self._answer = None
        self.after_result &= role == "user"
        self.messages.append({"role": role, "content": content})

    def answer(self, text: str) -> None:
        """Add text of the assistant."""
        self._open(unless=("content", "tool_calls"))["content"] = text

    def think(self, text: str) -> None:
        """Add reasoning of the assistant."""
        message = self._open(unless=("content", "tool_calls"))
        before = message.get("reasoning")
        message["reasoning"] = f"{before}\n{text}" if before else text

    def call(self, call_id: str, name: str, arguments: str | Json) -> None:
        """Add a call of the assistant's; arguments are JSON text or an object."""
        function = {"name": name, "arguments": arguments}
        calls = self._open().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: str | list[Json]) -> None:
        """Add what a call returned."""
        self._answer, self.after_result = None, True
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _open(self, unless: tuple[str, ...] = ()) -> Json:
        """Return the open answer, or a new one if that has any of these keys."""
        if self._answer is None or any(key in self._answer for key in unless):
            self._answer, self.after_result = {"role": "assistant"}, False
            self.messages.append(self._answer)
        return self._answer
