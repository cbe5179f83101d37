"""The cases and their results. Nothing here calls a server."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .answers import Answer
from .prompts import VerifyPrompt

_SEED = 20260101  # any will do, as long as it is always the same


class Sampling(StrEnum):
    """Kind of sampling."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


ALONE, TOGETHER = "alone", "together"
LIMIT, CROWD, NEWCOMERS = "at max_model_len", "64 x 8 samples", "newcomers"
PUBLISHED = "published failures"
LEAST_ROUNDS, LEAST_TIMED_TOKENS = 3, 256  # below which nothing is said about speed


@dataclass(frozen=True, slots=True)
class Case:
    """Way to answer all prompts. `company`: one of the above, or a fault."""

    sampling: Sampling
    company: str
    speculation: bool


@dataclass(frozen=True, slots=True)
class DifferencePosition:
    """The first difference between two answers. None for a token: that answer was over."""

    choice: int
    position: int
    expected: int | None
    got: int | None


@dataclass(slots=True)
class Difference:
    """An answer that differs from the reference. See `gaps.py` for the gap."""

    prompt: str
    place: (
        DifferencePosition | None
    )  # None: the tokens are equal, and the answers ended for other reasons
    what: str
    gap: float | None = None
    best: list[tuple[str, float]] = field(default_factory=list)
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of a case. `output_tok_s` by round; none where a speed would mean nothing."""

    case: Case
    num_answers: int
    num_equal: int
    differences: list[tuple[int, Difference]]  # with the index of the prompt
    failures: list[str]
    output_tok_s: list[float]
    longest_pause_s: float
    windows: int = 0  # verified meanwhile, by all cases of the same time

    @property
    def good(self) -> bool:
        """Return whether every answer has the reference's tokens."""
        return self.num_equal == self.num_answers


def options_of(
    prompt: VerifyPrompt, index: int, sampling: Sampling, *, speculation: bool, temperature: float
) -> dict[str, Any]:
    """Return the fields that a case adds to the body of a prompt."""
    options: dict[str, Any] = {}
    if sampling is Sampling.GREEDY:
        options["temperature"] = 0
    else:
        options["temperature"] = prompt.body.get("temperature") or temperature
        options["seed"] = prompt.body.get("seed", _SEED + index)
    if not speculation:
        options["speculative"] = {"num_tokens": 0}
    return options


def compare(prompt: VerifyPrompt, reference: Answer, answer: Answer) -> Difference | None:
    """Return the first difference, None if there is none."""
    for choice in sorted(reference.choices.keys() | answer.choices.keys()):
        old, new = reference.choices[choice], answer.choices[choice]
        place = _first(choice, old.token_ids, new.token_ids)
        if place is not None:
            return Difference(prompt.name, place, "another token")
        if old.finish_reason != new.finish_reason:
            what = f"finish reason {old.finish_reason} became {new.finish_reason}"
            return Difference(prompt.name, None, what)
    return None


def _first(choice: int, expected: Sequence[int], got: Sequence[int]) -> DifferencePosition | None:
    pairs = itertools.zip_longest(expected, got)
    return next(
        (
            DifferencePosition(choice, i, old, new)
            for i, (old, new) in enumerate(pairs)
            if old != new
        ),
        None,
    )


def judge(
    case: Case,
    prompts: Sequence[VerifyPrompt],
    references: Sequence[Answer],
    rounds: Sequence[Sequence[Answer]],
    windows: int = 0,
) -> CaseResult:
    """Compare the answers of a case with their references."""
    differences, failures = [], []
    answers = [answer for each in rounds for answer in each]
    for answered in rounds:
        for index, (prompt, old, new) in enumerate(zip(prompts, references, answered, strict=True)):
            if new.failure is not None:
                failures.append(f"{prompt.name}: {new.failure}")
            elif (difference := compare(prompt, old, new)) is not None:
                differences.append((index, difference))
    return CaseResult(
        case=case,
        num_answers=len(answers),
        num_equal=len(answers) - len(differences) - len(failures),
        differences=differences,
        failures=failures,
        output_tok_s=_speeds(case, rounds),
        longest_pause_s=max((answer.longest_pause_s for answer in answers), default=0.0),
        windows=windows,
    )


def _speeds(case: Case, rounds: Sequence[Sequence[Answer]]) -> list[float]:
    tokens = min((sum(answer.num_tokens for answer in each) for each in rounds), default=0)
    if case.company not in (ALONE, TOGETHER):
        return []
    if len(rounds) < LEAST_ROUNDS or tokens < LEAST_TIMED_TOKENS:
        return []
    speeds = [speed(each, together=case.company == TOGETHER) for each in rounds]
    return [each for each in speeds if each is not None]


def speed(answers: Sequence[Answer], *, together: bool) -> float | None:
    """Return tokens per second after each answer's first arrival, as prompts take time of their
    own.
    """
    streams = [answer.arrivals for answer in answers if answer.arrivals]
    tokens = sum(count for stream in streams for _, count in stream[1:])
    if together:
        times = [moment for stream in streams for moment, _ in stream]
        seconds = max(times) - min(times) if times else 0.0
    else:
        seconds = sum(stream[-1][0] - stream[0][0] for stream in streams)
    return tokens / seconds if seconds > 0 and tokens else None
