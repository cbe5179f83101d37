"""Answer: its tokens as they arrive, and its failure if there is one."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from surestep_cli.api.sessions import stream
from surestep_cli.api.stream import StreamEnded

from .prompts import VerifyPrompt

_FAILURE_CHARACTERS = 300
_ONLY_TEXT = "the server sends no token ids (return_token_ids), texts alone prove little"
_REFUSALS = (400, 404, 422, 501)
_OUTPUT = ("content", "reasoning", "reasoning_content", "tool_calls")  # of the delta of a chat


@dataclass(slots=True)
class Choice:
    """Sequence of an answer. `alternatives`: the best tokens at each position and their
    log-probabilities.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # of a chat: its content
    called: bool = False  # a tool
    finish_reason: str | None = None
    alternatives: list[list[tuple[str, float]]] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """All sequences of a request by index. Times are those of time.monotonic."""

    prompt_ids: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, tokens
    failure: str | None = None
    refused: bool = False  # before anything was computed, as a mistake of the request
    has_text: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def longest_pause_s(self) -> float:
        """Seconds between two arrivals; 0 where there are fewer than two."""
        times = [moment for moment, _ in self.arrivals]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def take(self, chunk: Mapping[str, Any]) -> int:
        """Add an event of the stream and return its number of tokens."""
        return sum(self._take(choice) for choice in chunk.get("choices", ()))

    def _take(self, piece: Mapping[str, Any]) -> int:
        new = piece.get("token_ids") or []
        said = piece.get("delta") or {}
        self.has_text |= bool(piece.get("text") or any(said.get(name) for name in _OUTPUT))
        self.prompt_ids = piece.get("prompt_token_ids") or self.prompt_ids
        choice = self.choices[piece.get("index", 0)]
        choice.token_ids += new
        choice.text += piece.get("text") or said.get("content") or ""
        choice.called |= bool(said.get("tool_calls"))
        choice.finish_reason = piece.get("finish_reason") or choice.finish_reason
        choice.alternatives += _alternatives(piece.get("logprobs"))
        if new:
            self.arrivals.append((time.monotonic(), len(new)))
        return len(new)


async def ask(
    session: aiohttp.ClientSession,
    prompt: VerifyPrompt,
    options: Mapping[str, Any],
    heard: Callable[[int], None] = lambda tokens: None,
) -> Answer:
    """Send a request and read the answer to its end. Failures are recorded in the answer."""
    answer = Answer()
    body = {**prompt.body, **options, "stream": True, "return_token_ids": True}
    try:
        await stream(session, prompt.path, body, lambda chunk: heard(answer.take(chunk)))
    except StreamEnded as end:
        late = end.kind == "timeout"
        reason = "no token for too long (--patience-s)" if late else str(end)
        answer.failure = reason[:_FAILURE_CHARACTERS]
        answer.refused = end.status in _REFUSALS
    else:
        if answer.has_text and not answer.num_tokens:
            answer.failure = _ONLY_TEXT
    return answer


def _alternatives(logprobs: Any) -> list[list[tuple[str, float]]]:
    """Return the alternatives of each token, from either format of the OpenAI API."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [
            [(each["token"], each["logprob"]) for each in one["top_logprobs"]]
            for one in logprobs["content"] or ()
        ]
    return [list((row or {}).items()) for row in logprobs.get("top_logprobs") or ()]
