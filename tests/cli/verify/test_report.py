"""What answers come to: differences, verdicts, speeds."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from surestep_cli.api.metrics import DraftStats
from surestep_cli.verify.answers import Answer, Choice
from surestep_cli.verify.cases import (
    ALONE,
    CROWD,
    LIMIT,
    NEWCOMERS,
    PUBLISHED,
    TOGETHER,
    Case,
    DifferencePosition,
    Sampling,
    compare,
    judge,
    speed,
)
from surestep_cli.verify.counters import Counts
from surestep_cli.verify.faults import Process, descends, strike
from surestep_cli.verify.prompts import COMPLETIONS, VerifyPrompt
from surestep_cli.verify.report import (
    Check,
    FaultResult,
    Question,
    ReportedIncident,
    Verdict,
    VerifyReport,
)
from surestep_cli.verify.show import remarks, rows, show, to_html
from surestep_cli.zoo import case as zoo
from surestep_cli.zoo.run import CASES
from surestep_common.errors import Unavailable

PROMPT = VerifyPrompt("a prompt", COMPLETIONS, {"prompt": "x"})


def answer(*choices: list[int], times: list[float] | None = None, reason: str = "length") -> Answer:
    """A token at each of the times."""
    made = Answer(arrivals=[(moment, 1) for moment in times or []])
    made.choices.update({i: Choice(ids, reason) for i, ids in enumerate(choices)})
    return made


@pytest.mark.parametrize(
    ("got", "place"),
    [
        (answer([1, 2, 3], [4]), None),
        (answer([1, 9, 3], [4]), DifferencePosition(0, 1, 2, 9)),
        (answer([1, 2], [4]), DifferencePosition(0, 2, 3, None)),
        (answer([1, 2, 3, 4], [4]), DifferencePosition(0, 3, None, 4)),
        (answer([1, 2, 3], [5]), DifferencePosition(1, 0, 4, 5)),
        (answer([1, 2, 3]), DifferencePosition(1, 0, 4, None)),
        (answer([], []), DifferencePosition(0, 0, 1, None)),
    ],
)
def test_the_first_difference(got: Answer, place: DifferencePosition | None) -> None:
    difference = compare(PROMPT, answer([1, 2, 3], [4]), got)
    assert (difference and difference.place) == place


def test_speed_leaves_the_prompts_out() -> None:
    early = answer([1, 2, 3], times=[10.0, 10.5, 11.0])
    late = answer([1, 2, 3], times=[12.0, 12.5, 13.0])
    assert speed([early, late], together=False) == 2.0  # 4 tokens in 1 s and 1 s
    assert speed([early, late], together=True) == pytest.approx(4 / 3)  # in 3 s
    assert speed([answer([1], times=[5.0])], together=False) is None
    assert speed([], together=True) is None


def test_a_lost_answer_is_not_equal() -> None:
    lost = answer([1, 2])
    lost.failure = "gone"
    good = answer([1, 2], times=[1.0, 1.5])
    result = judge(Case(Sampling.GREEDY, TOGETHER, True), [PROMPT] * 2, [good] * 2, [[good, lost]])
    assert (result.num_equal, result.num_answers, result.good) == (1, 2, False)
    assert result.failures == ["a prompt: gone"]
    assert result.longest_pause_s == 0.5


COMPANIES = (ALONE, TOGETHER, LIMIT, CROWD, NEWCOMERS, "worker killed")
LONG = [*range(300)]
DRAFTS = DraftStats(200, 800, 400, (200, 100, 100, 0))


def report(*, problem: str | None = None, wrong: bool = False) -> VerifyReport:
    """Report of eight prompts, all cases of greedy ones, one fault."""
    cases = [
        Case(Sampling.GREEDY, company, mode) for company in COMPANIES for mode in (False, True)
    ]
    good = answer(LONG, times=[1.0, 1.1, 1.6])
    fast = answer(LONG, times=[1.0, 1.1, 1.3])
    rounds = {False: [[good] * 8] * 3, True: [[fast] * 8] * 3}
    results = [
        judge(case, [PROMPT] * 8, [good] * 8, rounds[case.speculation], 7 * case.speculation)
        for case in cases
    ]
    if wrong:
        bad = [answer([0, 7, *LONG[2:]]), *[good] * 7]
        results[-1] = judge(cases[-1], [PROMPT] * 8, [good] * 8, [bad])
    incident = ReportedIncident("worker_exit", "signal SIGKILL", 0.1, 0.9, 1)
    fault = FaultResult("killed", 0, 77, 2, 2, [incident], problem)
    return VerifyReport(
        version="1",
        started="2026-01-01T00:00:00+00:00",
        took_s=3.0,
        model="m",
        url=None,
        is_surestep=True,
        flags={"dtype": "float32"},
        speculative_config={"method": "ngram"},
        speculates=True,
        temperature=0.5,
        questions=[Question("a prompt", {Sampling.GREEDY: 3, Sampling.SAMPLED: 0})],
        results=results,
        faults=[fault],
        counts=Counts(DRAFTS, preemptions=3, rows=500, digests=20),
        reference_windows=0,
        checks=[Check("parameters", Verdict.EQUAL, "9 parameters are obeyed")],
        published=[zoo.CaseResult(CASES[0], zoo.passed("equal"), 1.0)],
        skipped={},
        notes=["a note"],
    )


def test_verdicts() -> None:
    assert report().verdict is Verdict.EQUAL
    assert report(problem="too short").verdict is Verdict.NOT_SHOWN
    assert report(problem="too short", wrong=True).verdict is Verdict.DIFFERENT
    assert [verdict.exit_status for verdict in Verdict] == [0, 1, 2]


def without(whole: VerifyReport, *companies: str) -> VerifyReport:
    return replace(whole, results=[r for r in whole.results if r.case.company not in companies])


NO_WINDOWS = [replace(result, windows=0) for result in report().results]
FEW = Check("answers fed back", Verdict.NOT_SHOWN, "no prompt_logprobs")
CUT = zoo.CaseResult(CASES[0], zoo.unclear("prompts are cut"), 1.0)
MET = zoo.CaseResult(
    next(case for case in CASES if case.name == "usage"), zoo.failed("7 tokens counted"), 1.0
)
BAD = Check("different prompts", Verdict.DIFFERENT, "all 6 prompts have the same answer")


@pytest.mark.parametrize(
    ("changed", "verdict", "said"),
    [
        ({"counts": Counts(DraftStats(99, 9, 4), 3, 500)}, "not shown", "99 draft windows"),
        ({"counts": Counts(DraftStats(200, 9, 0), 3, 500)}, "not shown", "0 of 9 drafts"),
        ({"counts": Counts(DraftStats(200, 9, 9), 3, 500)}, "not shown", "9 of 9 drafts"),
        ({"counts": Counts(DRAFTS, 0, 500)}, "not shown", "no request was preempted"),
        ({"counts": Counts(DRAFTS, 3, 99)}, "not shown", "99 rows compared"),
        ({"counts": Counts(DRAFTS, 3, 500, 20, 1)}, "different", "1 steps contradicted it"),
        ({"reference_windows": 1}, "not shown", "while the reference was computed"),
        ({"skipped": {LIMIT: "131072 tokens"}}, "not shown", "131072 tokens"),
        ({"results": without(report(), LIMIT).results}, "not shown", "0 rows ran into it"),
        ({"results": NO_WINDOWS}, "not shown", "no draft window was verified there"),
        ({"checks": []}, "not shown", "nothing could be looked at"),
        ({"checks": [FEW]}, "not shown", "no prompt_logprobs"),
        ({"checks": [FEW, BAD]}, "different", "the same answer"),
        ({"published": [CUT, MET]}, "different", "usage: 7 tokens counted"),
        ({"published": [CUT]}, "not shown", "1 cannot tell"),
        ({"skipped": {PUBLISHED: "not asked with --quick"}}, "equal", "not asked with --quick"),
        ({"faults": []}, "equal", "nothing was killed"),
        ({"is_surestep": False}, "equal", "a server of another kind has none"),
        ({"skipped": {NEWCOMERS: "with API keys"}}, "equal", "with API keys"),
    ],
)
def test_too_little_is_no_proof(changed: dict[str, Any], verdict: str, said: str) -> None:
    found = replace(report(), **changed)
    assert found.verdict == verdict
    assert any(said in claim.evidence for claim in found.claims), found.claims
    assert found.summary.startswith(verdict.upper())


def test_the_table_has_both_ways_side_by_side() -> None:
    first, *_, last = (row for row in rows(report()) if row[0] == "greedy")
    assert first == ("greedy", "alone", "24 of 24", "24 of 24", "7", "0.50 s")
    assert last == ("greedy", "worker killed", "24 of 24", "24 of 24", "7", "0.50 s")


def test_without_speculation_there_is_one_side() -> None:
    whole = report()
    alone = replace(whole, results=[r for r in whole.results if not r.case.speculation])
    assert next(rows(alone))[3:5] == ("-", "-")


def test_speed_is_told_with_its_spread_or_not_at_all() -> None:
    told = [line for line in remarks(report()) if line.startswith("Speed")]
    assert told[0].startswith("Speed, greedy, alone: 2.00 times as fast with drafts (2.00 to 2.00)")
    assert len(told) == 2  # none beside a fault
    case, one = Case(Sampling.GREEDY, ALONE, True), answer(LONG, times=[1.0, 1.1])
    assert judge(case, [PROMPT], [one], [[one]] * 2).output_tok_s == []  # too few rounds
    few = answer(LONG[:255], times=[1.0, 1.1])
    assert judge(case, [PROMPT], [few], [[few]] * 3).output_tok_s == []  # too few tokens
    assert len(judge(case, [PROMPT], [one], [[one]] * 3).output_tok_s) == 3


def test_a_pipe_gets_whole_words_and_no_colours() -> None:
    out = Console(width=80, file=io.StringIO())
    show(report(wrong=True), out)
    assert isinstance(out.file, io.StringIO)
    told = out.file.getvalue()
    assert "\x1b" not in told
    assert "…" not in told
    assert "greedy, worker killed, with speculation: a prompt, token 2: another token" in told


def test_every_form_tells_the_same() -> None:
    shown = report(wrong=True)
    document = json.loads(shown.to_json())
    assert document["verdict"] == "different"
    assert document["exit_status"] == 1
    assert document["speedup"]["greedy, alone"]["median"] == pytest.approx(2.0)
    assert {claim["verdict"] for claim in document["claims"]} == {"equal", "different"}
    assert document["ledger"] == {"rows": 500, "digests": 20, "mismatches": 0}
    (difference,) = document["cases"][-1]["differences"]
    assert difference["place"] == {"choice": 0, "position": 1, "expected": 1, "got": 7}
    assert document["faults"][0]["incidents"][0]["cause"] == "worker_exit"
    assert document["drafts"]["acceptance_per_position"] == [1, 0.5, 0.5, 0]
    html = to_html(shown)
    for text in (
        "answers 1 differ, 0 were lost",
        "worker_exit",
        "a note",
        "float32",
    ):
        assert text in html


def test_only_processes_of_its_own_are_struck() -> None:
    assert descends(os.getpid(), os.getppid())
    assert not descends(os.getppid(), os.getpid())
    assert not descends(1 << 22, os.getpid())
    with pytest.raises(Unavailable, match="none that this command has started"):
        strike(Process("s", 0, os.getppid()), signal.SIGKILL, os.getpid())


def test_acceptance_of_nothing() -> None:
    assert DraftStats().rates() == []
    assert DraftStats(4, 8, 4, (3, 1)).since(DraftStats(2, 4, 1, (1,))) == DraftStats(
        2, 4, 3, (2, 1)
    )
