"""A conversation over the chat API: its messages, and the answer as it streams."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import SecretStr
from surestep_common.errors import Unavailable

from surestep_cli.api.http import api_root, call, model_card, no_answer, posted
from surestep_cli.api.stream import StreamEnded, events

_MODELS_TIMEOUT_S = 10.0
_MOST_ERROR_BYTES = 64 << 10


@dataclass(slots=True)
class Reply:
    """An answer as far as it has arrived. Times are of time.monotonic."""

    content: str = ""
    reasoning: str = ""
    asked: float = 0.0
    first: float | None = None
    last: float = 0.0
    chunks: int = 0
    tokens: int | None = None  # as the server counts
    finish_reason: str | None = None

    def speed(self) -> str:
        if self.first is None:
            return "no answer"
        tokens = self.tokens if self.tokens is not None else self.chunks
        seconds = self.last - self.first
        rate = f", {(tokens - 1) / seconds:.1f} tok/s" if tokens > 1 and seconds > 0 else ""
        end = f", ended by {self.finish_reason}" if self.finish_reason not in (None, "stop") else ""
        return f"{tokens} tokens{rate}, first after {self.first - self.asked:.2f} s{end}"


class OnPiece(Protocol):
    """Callback for the pieces of an answer."""

    def __call__(self, text: str, *, reasoning: bool) -> None: ...


@dataclass(slots=True)
class Conversation:
    """A conversation. `fields` go into every request."""

    url: str
    api_key: SecretStr | None
    fields: dict[str, Any]
    timeout_s: float
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the request for the next answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.fields, "messages": [*first, *self.messages], **streamed}

    def answer(self, piece: OnPiece) -> Reply:
        """Request an answer and read it to its end, or to Ctrl-C. Raise SurestepError."""
        heard = Reply(asked=time.monotonic())
        url = f"{api_root(self.url)}/v1/chat/completions"
        try:
            with posted(url, self.body(), api_key=self.api_key, timeout_s=self.timeout_s) as stream:
                if stream.status != 200:
                    body = stream.read(_MOST_ERROR_BYTES).decode(errors="replace")
                    raise StreamEnded.refused(stream.status, body)
                with contextlib.suppress(KeyboardInterrupt):
                    for chunk in events(stream):
                        _take(heard, chunk, piece)
        except OSError as error:
            raise no_answer(self.url, error) from error
        self.messages.append({"role": "assistant", "content": heard.content})
        return heard


def first_model(url: str, api_key: SecretStr | None) -> str:
    """Return the name of the server's first model. Raise Unavailable and InvalidRequest."""
    try:
        answer = call(f"{api_root(url)}/v1/models", api_key=api_key, timeout_s=_MODELS_TIMEOUT_S)
    except OSError as error:
        raise no_answer(url, error) from error
    if answer.status != 200:
        message = (answer.body or {}).get("error", {}).get("message", f"HTTP {answer.status}")
        raise Unavailable(f"{url} names no model: {message}")
    return str(model_card(answer.body)["id"])


def _take(heard: Reply, chunk: dict[str, Any], piece: OnPiece) -> None:
    if usage := chunk.get("usage"):
        heard.tokens = usage.get("completion_tokens")
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        content = delta.get("content") or ""
        if reasoning or content:
            heard.last = time.monotonic()
            heard.first = heard.first if heard.first is not None else heard.last
            heard.chunks += 1
        if reasoning:
            heard.reasoning += reasoning
            piece(reasoning, reasoning=True)
        if content:
            heard.content += content
            piece(content, reasoning=False)
