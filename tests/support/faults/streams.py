"""Sixteen streams of every kind, and what their clients got."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from openai import AsyncOpenAI

STREAMS = 16
LATE = 6  # of them, opened when the others decode: the fault meets them in their prompts
MAX_TOKENS = 200
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9},
    "two choices": {"temperature": 0.8, "n": 2},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "stop string": {"temperature": 0.6},  # the string is found by running it without one
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "extra_body": {"repetition_penalty": 1.2},
    },
}
_WORDS = [
    "the",
    "statement",
    "is",
    "used",
    "to",
    "say",
    "what",
    "a",
    "loop",
    "does",
    "when",
    "one",
    "of",
    "its",
    "names",
    "is",
    "bound",
    "to",
    "an",
    "object",
    "and",
    "the",
    "value",
    "of",
    "that",
    "expression",
    "raises",
    "an",
    "error",
    "in",
    "the",
    "body",
    "of",
    "a",
    "class",
    "or",
    "function",
]


@dataclass(frozen=True, slots=True)
class Ask:
    """Request as the official client takes it."""

    kind: str
    options: dict[str, Any]

    @property
    def num_choices(self) -> int:
        """Sequences it asks for."""
        n: int = self.options.get("n", 1)
        return n

    def longer(self, tokens: int) -> Ask:
        """The same with room for so many tokens."""
        return Ask(self.kind, {**self.options, "max_tokens": tokens})

    def until(self, stop: str) -> Ask:
        """The same with a stop string."""
        return Ask(self.kind, {**self.options, "stop": [stop]})


@dataclass(slots=True)
class Choice:
    """Sequence as it arrived. `logprobs` are (token, logprob, alternatives)."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)

    def take(self, choice: Any) -> int:
        """Add one chunk; returns how many tokens it brought."""
        assert self.finish_reason is None, "a chunk behind the last one"
        new = getattr(choice, "token_ids", None) or []  # our field: the client does not know it
        self.token_ids += new
        self.text += choice.text
        self.finish_reason = choice.finish_reason
        if (columns := choice.logprobs) is not None:
            rows = zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True)
            self.logprobs += rows
        return len(new)


@dataclass(slots=True)
class Answer:
    """All sequences of a request, its usage, and when output came (seconds, monotonic)."""

    choices: list[Choice]
    usage: tuple[int, int] = (0, 0)  # tokens of the prompt, tokens of the answers
    times: list[float] = field(default_factory=list)  # first is when it was sent

    @classmethod
    def of(cls, request: Ask) -> Answer:
        """Nothing yet."""
        return cls([Choice() for _ in range(request.num_choices)])

    @property
    def pause_s(self) -> float:
        """The longest that the client had to wait for something."""
        return max(later - earlier for earlier, later in itertools.pairwise(self.times))

    def wait_across(self, moment: float) -> float | None:
        """From the last output before a moment to the first after it; None if not open then."""
        return next(
            (b - a for a, b in itertools.pairwise(self.times) if a <= moment < b),
            None,
        )


class Tally:
    """Tokens that have reached all clients together: the clock by which faults are timed.

    Its streams find each other's prefixes and answers, and none of an earlier run: they would be
    over at once.
    """

    def __init__(self) -> None:
        self.tokens, self.salt = 0, uuid4().hex
        self._waiting: dict[asyncio.Event, int] = {}

    def add(self, count: int) -> None:
        """So many more."""
        self.tokens += count
        for event, wanted in self._waiting.items():
            if self.tokens >= wanted:
                event.set()

    async def reached(self, wanted: int) -> None:
        """Return when there are so many."""
        if self.tokens < wanted:
            event = asyncio.Event()
            self._waiting[event] = wanted
            await event.wait()
            del self._waiting[event]


def mix(rng: random.Random, count: int = STREAMS, max_tokens: int = MAX_TOKENS) -> list[Ask]:
    """Requests of all kinds in turn; the late ones, at the end, have long prompts."""
    kinds = itertools.cycle(KINDS.items())
    asks = []
    for index, (kind, options) in zip(range(count), kinds, strict=False):
        words = rng.randint(80, 120) if index >= count - LATE else rng.randint(3, 12)
        asks.append(ask(kind, options, rng, words, max_tokens))
    return asks


def ask(kind: str, options: dict[str, Any], rng: random.Random, words: int, tokens: int) -> Ask:
    """A request with a prompt of so many words, some of which come again."""
    prompt = rng.choices(_WORDS, k=words)
    extra = {"ignore_eos": True, "return_token_ids": True, **options.get("extra_body", {})}
    own = {
        "prompt": " ".join(prompt[:4] + prompt),
        "max_tokens": tokens,
        "seed": rng.getrandbits(31),
    }
    return Ask(kind, {**options, **own, "extra_body": extra})


async def stream(
    client: AsyncOpenAI, request: Ask, tally: Tally, answer: Answer | None = None
) -> Answer:
    """Read one stream to its end, into `answer`. Raises what the client raises."""
    answer = answer or Answer.of(request)
    answer.times.append(time.monotonic())
    extra = {"cache_salt": tally.salt, **request.options.get("extra_body", {})}
    options = {**request.options, "extra_body": extra, "stream_options": {"include_usage": True}}
    chunks = await client.completions.create(model="tiny", stream=True, **options)
    async for chunk in chunks:
        answer.times.append(time.monotonic())
        for choice in chunk.choices:
            tally.add(answer.choices[choice.index].take(choice))
        if chunk.usage is not None:
            answer.usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    return answer


def late_stop(text: str) -> str:
    """Three characters that the text holds only near its end."""
    cuts = (text[start : start + 3] for start in range(2 * len(text) // 3, len(text) - 3))
    return max((cut for cut in cuts if "\ufffd" not in cut), key=text.index)


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> list[str]:
    """Return the differences from the run without faults, one line each."""
    found = []
    for index, (before, after) in enumerate(zip(expected, got, strict=True)):
        pairs = list(zip(before.choices, after.choices, strict=True))
        for name in ("token_ids", "text", "finish_reason"):
            for old, new in pairs:
                if getattr(old, name) != getattr(new, name):
                    found.append(f"stream {index}: {name} {_where(old, new, name)}")
        if before.usage != after.usage:
            found.append(f"stream {index}: usage {before.usage} became {after.usage}")
        if not all(_close(old, new) for old, new in pairs):
            found.append(f"stream {index}: other logprobs")
    return found


def prefix_of(part: Answer, whole: Answer) -> bool:
    """Whether an answer that was broken off is the beginning of another one."""
    pairs = list(zip(part.choices, whole.choices, strict=True))
    return all(
        new.token_ids == old.token_ids[: len(new.token_ids)] and old.text.startswith(new.text)
        for new, old in pairs
    )


def _where(old: Choice, new: Choice, name: str) -> str:
    left, right = getattr(old, name), getattr(new, name)
    if name == "finish_reason":
        return f"{left} became {right}"
    same = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(left, right, strict=False)
        )
    )
    return f"of {len(left)} are {len(right)}, equal up to {same}: {left[same : same + 8]!r} became {right[same : same + 8]!r}"


def _close(old: Choice, new: Choice) -> bool:
    """Same tokens, and probabilities up to the rounding of another batch."""
    return len(old.logprobs) == len(new.logprobs) and all(
        a[0] == b[0]
        and abs(a[1] - b[1]) < 1e-3
        and sorted(a[2].values()) == sorted(a[2].values())
        and all(
            abs(x - y) < 1e-3
            for x, y in zip(sorted(a[2].values()), sorted(b[2].values()), strict=True)
        )
        for a, b in zip(old.logprobs, new.logprobs, strict=True)
    )
