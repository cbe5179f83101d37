"""The result of `verify`, as one value that table, JSON and HTML show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from surestep_cli.api.draft_stats import DraftStats

from .cases import ALONE, TOGETHER, CaseResult, Sampling
from .faults import ReportedIncident

_COMPANIES = (ALONE, TOGETHER)


class Verdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"  # or a request was lost
    NOT_SHOWN = "not shown"  # no difference, but a fault did not happen as it was to

    @property
    def exit_status(self) -> int:
        """Exit status of the command."""
        return {Verdict.EQUAL: 0, Verdict.DIFFERENT: 1, Verdict.NOT_SHOWN: 2}[self]


@dataclass(slots=True)
class FaultResult:
    """One fault. `problem` is the reason why it was inconclusive, if it was."""

    name: str
    rank: int | None = None
    pid: int | None = None
    num_open: int = 0  # streams that had some of their tokens, and not all
    incidents: list[ReportedIncident] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the length of its answers."""

    name: str
    tokens: dict[Sampling, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    version: str
    started: str  # ISO 8601
    took_s: float
    model: str
    url: str | None  # of a server that ran already
    flags: dict[str, Any]  # settings that affect results; no secrets
    speculative_config: dict[str, Any] | None
    temperature: float
    questions: list[Question]
    results: list[CaseResult]
    faults: list[FaultResult]
    drafts: DraftStats  # of all cases together
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        if not all(result.good for result in self.results):
            return Verdict.DIFFERENT
        shown = all(fault.problem is None for fault in self.faults)
        return Verdict.EQUAL if shown else Verdict.NOT_SHOWN

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        answers = sum(result.num_answers for result in self.results)
        equal = sum(result.num_equal for result in self.results)
        lost = sum(len(result.failures) for result in self.results)
        if self.verdict is Verdict.EQUAL:
            return f"EQUAL: all {answers} answers have the tokens of the reference"
        if self.verdict is Verdict.NOT_SHOWN:
            return f"NOT SHOWN: {equal} answers are equal, but not every fault happened"
        return f"DIFFERENT: of {answers} answers {answers - equal - lost} differ, {lost} were lost"

    def companies(self) -> list[str]:
        """The companies of the cases, in their order."""
        return list(dict.fromkeys(result.case.company for result in self.results))

    def find(self, sampling: Sampling, company: str, *, speculation: bool) -> CaseResult | None:
        wanted = sampling, company, speculation
        cases = ((r, (r.case.sampling, r.case.company, r.case.speculation)) for r in self.results)
        return next((result for result, case in cases if case == wanted), None)

    def speedup(self, sampling: Sampling, company: str) -> float | None:
        """Return tokens per second with speculation divided by those without."""
        pair = [self.find(sampling, company, speculation=on) for on in (True, False)]
        speeds = [result.output_tok_s if result is not None else None for result in pair]
        return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None

    def to_json(self) -> str:
        """Return the report for programs; docs/verify.md names the keys."""
        results = []
        for result in self.results:
            shown = asdict(result)
            shown |= shown.pop("case")
            shown["differences"] = [asdict(difference) for _, difference in result.differences]
            results.append(shown)
        document = {
            "verdict": self.verdict,
            "exit_status": self.verdict.exit_status,
            "summary": self.summary,
            **{name: getattr(self, name) for name in _PLAIN},
            "prompts": [asdict(question) for question in self.questions],
            "cases": results,
            "speedup": {
                f"{sampling}, {company}": self.speedup(sampling, company)
                for sampling in Sampling
                for company in _COMPANIES
            },
            "faults": [_fault(fault) for fault in self.faults],
            "drafts": {**asdict(self.drafts), "acceptance_per_position": self.drafts.rates()},
        }
        return json.dumps(document, indent=2)


_PLAIN = (
    *("version", "started", "took_s", "model", "url", "flags", "speculative_config"),
    *("temperature", "notes"),
)


def _fault(fault: FaultResult) -> dict[str, Any]:
    return {**asdict(fault), "incidents": [each._asdict() for each in fault.incidents]}


def differences_of(results: Sequence[CaseResult]) -> list[tuple[CaseResult, str]]:
    """Return a few lines for each failure, with the case it belongs to."""
    lines = []
    for result in results:
        lines += [(result, f"lost: {failure}") for failure in result.failures]
        for _, found in result.differences:
            where = f", token {found.place.position + 1}" if found.place is not None else ""
            text = f"{found.prompt}{where}: {found.what}"
            if found.gap is not None:
                best = " and ".join(f"{token!r} {logprob:.3f}" for token, logprob in found.best)
                text += f". Gap of the two best logits there: {found.gap:.3f} ({best})"
            lines.append((result, f"{text}. {_sentence(found.meaning)}" if found.meaning else text))
    return lines


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
