"""The result of `verify`, as one value that table, JSON and HTML show."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from surestep_cli.zoo import case as zoo
from surestep_cli.zoo.report import counted, documented

from .cases import (
    ALONE,
    CROWD,
    LIMIT,
    NEWCOMERS,
    PUBLISHED,
    TOGETHER,
    CaseResult,
    Sampling,
)
from .counters import Counts

_COMPANIES = (ALONE, TOGETHER)
# Below these a promise is not shown.
LEAST_WINDOWS = 100  # verified in all
LEAST_LIMIT_ROWS = 8  # prompts that run into max_model_len
LEAST_CHECKED_ROWS = 100  # of the ledger


class Verdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"  # or a request was lost
    NOT_SHOWN = "not shown"  # no difference, but too little happened to say so

    @property
    def exit_status(self) -> int:
        """Exit status of the command."""
        return {Verdict.EQUAL: 0, Verdict.DIFFERENT: 1, Verdict.NOT_SHOWN: 2}[self]


class Claim(NamedTuple):
    """A promise and what was found. `verdict` is None for one that was not asked for."""

    name: str
    verdict: Verdict | None
    evidence: str


class Check(NamedTuple):
    """A look at the tokens themselves: see `oracle.py`."""

    name: str
    verdict: Verdict
    detail: str


class ReportedIncident(NamedTuple):
    """A lost epoch as the server reports it."""

    cause: str
    reason: str
    detect_s: float
    recover_s: float
    num_replayed_requests: int


@dataclass(slots=True)
class FaultResult:
    """Result of a fault. `problem` is the reason why it was inconclusive, if it was."""

    name: str
    rank: int | None = None
    pid: int | None = None
    num_open: int = 0  # streams that had some of their tokens, and not all
    num_went_on: int = 0  # requests, as the server counts them
    incidents: list[ReportedIncident] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the length of its answers."""

    name: str
    tokens: dict[Sampling, int]


class Spread(NamedTuple):
    """The median of all rounds, between their extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return None for no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    version: str
    started: str  # ISO 8601
    took_s: float
    model: str
    url: str | None  # of a server that ran already
    is_surestep: bool
    flags: dict[str, Any]  # settings that affect results; no secrets
    speculative_config: dict[str, Any] | None
    speculates: bool  # whether speculation was asked for
    temperature: float
    questions: list[Question]
    results: list[CaseResult]
    faults: list[FaultResult]
    counts: Counts  # of all cases together
    reference_windows: int  # verified while the references were computed
    checks: list[Check]
    published: list[zoo.CaseResult]  # failures that were looked for
    skipped: dict[str, str]  # cases that were not run, and why
    notes: list[str]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the promises that were asked for."""
        found = {claim.verdict for claim in self.claims}
        worst_first = (Verdict.DIFFERENT, Verdict.NOT_SHOWN)
        return next((each for each in worst_first if each in found), Verdict.EQUAL)

    @property
    def claims(self) -> list[Claim]:
        """Every promise with its verdict."""
        return [
            self._tokens(),
            self._limit(),
            self._crowd(),
            self._preemption(),
            self._faults(),
            self._steps(),
            self._model(),
            self._published(),
        ]

    def _claim(self, name: str, companies: Sequence[str], problem: str, evidence: str) -> Claim:
        """Judge cases; `problem` says why they show nothing even if they are all equal."""
        results = [each for each in self.results if each.case.company in companies]
        answers = sum(each.num_answers for each in results)
        equal = sum(each.num_equal for each in results)
        if equal < answers:
            lost = sum(len(each.failures) for each in results)
            bad = f"of {answers} answers {answers - equal - lost} differ, {lost} were lost"
            return Claim(name, Verdict.DIFFERENT, bad)
        if problem:
            return Claim(name, Verdict.NOT_SHOWN, problem)
        return Claim(name, Verdict.EQUAL, f"{answers} answers are equal; {evidence}")

    def _tokens(self) -> Claim:
        if not self.speculates:
            return self._claim("company changes no token", _COMPANIES, "", "speculation is off")
        drafts, problem = self.counts.drafts, ""
        if drafts.windows < LEAST_WINDOWS:
            problem = f"{drafts.windows} draft windows were verified, {LEAST_WINDOWS} are needed"
        elif self.reference_windows:
            problem = (
                f"{self.reference_windows} windows were verified while the reference was computed, "
                "which was to have none"
            )
        elif not drafts.accepted or drafts.accepted == drafts.drafted:
            problem = f"{drafts.accepted} of {drafts.drafted} drafts were accepted: some must be, "
            problem += "and some rejected"
        evidence = (
            f"{drafts.windows} windows, {drafts.accepted} of {drafts.drafted} drafts accepted"
        )
        return self._claim("speculation changes no token", _COMPANIES, problem, evidence)

    def _limit(self) -> Claim:
        rows = max((each.num_answers for each in self._of(LIMIT)), default=0)
        problem = self.skipped.get(LIMIT, "")
        if not problem and rows < LEAST_LIMIT_ROWS:
            problem = f"{rows} rows ran into it, {LEAST_LIMIT_ROWS} are needed"
        windows = sum(each.windows for each in self._of(LIMIT))
        problem = problem or self._windowless(LIMIT)
        return self._claim("max_model_len is met", (LIMIT,), problem, f"{windows} windows")

    def _crowd(self) -> Claim:
        problem = self.skipped.get(CROWD, "") or self._windowless(CROWD)
        windows = sum(each.windows for each in self._of(CROWD))
        return self._claim("64 prompts x 8 samples", (CROWD,), problem, f"{windows} windows")

    def _windowless(self, company: str) -> str:
        windows = sum(each.windows for each in self._of(company))
        return "" if windows or not self.speculates else "no draft window was verified there"

    def _of(self, company: str) -> list[CaseResult]:
        return [each for each in self.results if each.case.company == company]

    def _preemption(self) -> Claim:
        name = "preemption changes no token"
        if (reason := self.skipped.get(NEWCOMERS)) is not None:
            return Claim(name, None, reason)
        count = self.counts.preemptions
        problem = "" if count else "no request was preempted; a smaller --max-num-seqs would"
        return self._claim(name, (NEWCOMERS, CROWD), problem, f"{count} preemptions")

    def _faults(self) -> Claim:
        name = "a lost process costs no request"
        if not self.faults:
            why = "nothing was killed" + (" behind --url" if self.url is not None else "")
            return Claim(name, None, why)
        others = {*_COMPANIES, LIMIT, CROWD, NEWCOMERS}
        hurt = {each.case.company for each in self.results} - others
        problems = [f"{each.name}: {each.problem}" for each in self.faults if each.problem]
        went_on = sum(each.num_went_on for each in self.faults)
        evidence = f"{len(self.faults)} faults, {went_on} requests went on"
        return self._claim(name, tuple(hurt), "; ".join(problems), evidence)

    def _steps(self) -> Claim:
        name, counts = "both sides keep the ledger", self.counts
        if not self.is_surestep:
            return Claim(name, None, "a server of another kind has none")
        if counts.mismatches:
            return Claim(name, Verdict.DIFFERENT, f"{counts.mismatches} steps contradicted it")
        ranks = f"{counts.digests} digests of ranks" if counts.digests else "one rank, no digests"
        evidence = f"{counts.rows} rows compared, {ranks}"
        enough = counts.rows >= LEAST_CHECKED_ROWS
        return Claim(name, Verdict.EQUAL if enough else Verdict.NOT_SHOWN, evidence)

    def _model(self) -> Claim:
        name = "the tokens are the model's"
        for verdict in (Verdict.DIFFERENT, Verdict.NOT_SHOWN):
            bad = [f"{each.name}: {each.detail}" for each in self.checks if each.verdict is verdict]
            if bad:
                return Claim(name, verdict, "; ".join(bad))
        if not self.checks:
            return Claim(name, Verdict.NOT_SHOWN, "nothing could be looked at")
        return Claim(name, Verdict.EQUAL, "; ".join(each.detail for each in self.checks))

    def _published(self) -> Claim:
        name = "no published failure is met"
        if (reason := self.skipped.get(PUBLISHED)) is not None:
            return Claim(name, None, reason)
        met = [each for each in self.published if each.finding.verdict is zoo.Verdict.FAIL]
        if met:
            told = "; ".join(f"{each.case.name}: {each.finding.why}" for each in met)
            return Claim(name, Verdict.DIFFERENT, told)
        shown = any(each.finding.verdict is zoo.Verdict.PASS for each in self.published)
        return Claim(name, Verdict.EQUAL if shown else Verdict.NOT_SHOWN, counted(self.published))

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        answers = sum(result.num_answers for result in self.results)
        equal = sum(result.num_equal for result in self.results)
        lost = sum(len(result.failures) for result in self.results)
        if self.verdict is Verdict.NOT_SHOWN:
            open_ones = [each.name for each in self.claims if each.verdict is Verdict.NOT_SHOWN]
            return f"NOT SHOWN: {equal} of {answers} answers are equal, but: {', '.join(open_ones)}"
        if self.verdict is Verdict.EQUAL:
            not_asked = [each.name for each in self.claims if each.verdict is None]
            rest = f"; not asked: {', '.join(not_asked)}" if not_asked else ""
            return f"EQUAL: all {answers} answers have the tokens of the reference{rest}"
        if equal < answers:
            return (
                f"DIFFERENT: of {answers} answers {answers - equal - lost} differ, {lost} were lost"
            )
        wrong = [each.name for each in self.claims if each.verdict is Verdict.DIFFERENT]
        return f"DIFFERENT: it does not hold that {', '.join(wrong)}"

    def companies(self) -> list[str]:
        """The companies of the cases, in their order."""
        return list(dict.fromkeys(result.case.company for result in self.results))

    def find(self, sampling: Sampling, company: str, *, speculation: bool) -> CaseResult | None:
        wanted = sampling, company, speculation
        cases = ((r, (r.case.sampling, r.case.company, r.case.speculation)) for r in self.results)
        return next((result for result, case in cases if case == wanted), None)

    def speedup(self, sampling: Sampling, company: str) -> Spread | None:
        """Return the speed with speculation divided by that without, of rounds in turns."""
        pair = [self.find(sampling, company, speculation=on) for on in (True, False)]
        speeds = [result.output_tok_s if result is not None else [] for result in pair]
        return Spread.of([fast / slow for fast, slow in zip(*speeds, strict=False)])

    def to_json(self) -> str:
        """Return the report for programs; docs/use/verify.md names the keys."""
        results = []
        for result in self.results:
            shown = asdict(result)
            shown |= shown.pop("case")
            shown["differences"] = [asdict(difference) for _, difference in result.differences]
            results.append(shown)
        drafts = self.counts.drafts
        document = {
            "verdict": self.verdict,
            "exit_status": self.verdict.exit_status,
            "summary": self.summary,
            "claims": [claim._asdict() for claim in self.claims],
            **{name: getattr(self, name) for name in _PLAIN},
            "prompts": [asdict(question) for question in self.questions],
            "cases": results,
            "speedup": {
                f"{sampling}, {company}": spread and spread._asdict()
                for sampling in Sampling
                for company in _COMPANIES
                for spread in [self.speedup(sampling, company)]
            },
            "faults": [_fault(fault) for fault in self.faults],
            "drafts": {**asdict(drafts), "acceptance_per_position": drafts.rates()},
            "ledger": {n: getattr(self.counts, n) for n in ("rows", "digests", "mismatches")},
            "preemptions": self.counts.preemptions,
            "checks": [check._asdict() for check in self.checks],
            "published": [documented(each) for each in self.published],
        }
        return json.dumps(document, indent=2)


_PLAIN = (
    "version",
    "started",
    "took_s",
    "model",
    "url",
    "flags",
    "speculative_config",
    "temperature",
    "reference_windows",
    "skipped",
    "notes",
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
