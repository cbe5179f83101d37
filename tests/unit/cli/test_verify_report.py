"""What answers come to: differences, verdicts, speeds."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console
from surestep_cli.api.draft_stats import DraftStats
from surestep_cli.verify.answers import Answer, Choice
from surestep_cli.verify.cases import (
    ALONE,
    TOGETHER,
    Case,
    DifferencePosition,
    Sampling,
    compare,
    judge,
    speed,
)
from surestep_cli.verify.faults import ReportedIncident, WorkerRank, descends, strike
from surestep_cli.verify.html import to_html
from surestep_cli.verify.prompts import COMPLETIONS, VerifyPrompt
from surestep_cli.verify.report import FaultResult, Question, Verdict, VerifyReport
from surestep_cli.verify.table import rows, show
from surestep_common.errors import Unavailable

PROMPT = VerifyPrompt("a prompt", COMPLETIONS, {"prompt": "x"})


def answer(*choices: list[int], times: list[float] | None = None, reason: str = "length") -> Answer:
    """A token at each of the times."""
    made = Answer(arrivals=[(moment, 1) for moment in times or []], done=True)
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
    lost.fail("gone")
    good = answer([1, 2], times=[1.0, 1.5])
    result = judge(Case(Sampling.GREEDY, TOGETHER, True), [PROMPT] * 2, [good] * 2, [good, lost])
    assert (result.num_equal, result.num_answers, result.good) == (1, 2, False)
    assert result.failures == ["a prompt: gone"]
    assert result.longest_pause_s == 0.5


def report(*, problem: str | None = None, wrong: bool = False) -> VerifyReport:
    """Of one prompt, all cases of greedy ones, one fault."""
    cases = [
        Case(Sampling.GREEDY, company, mode)
        for company in (ALONE, TOGETHER, "worker killed")
        for mode in (False, True)
    ]
    good = answer([1, 2, 3], times=[1.0, 1.1, 1.6])
    fast = answer([1, 2, 3], times=[1.0, 1.1, 1.3])
    results = [
        judge(case, [PROMPT], [good], [fast if case.speculation else good]) for case in cases
    ]
    if wrong:
        results[-1] = judge(cases[-1], [PROMPT], [good], [answer([1, 7, 3])])
    incident = ReportedIncident("worker_exit", "signal SIGKILL", 0.1, 0.9, 1)
    fault = FaultResult("killed", 0, 77, 1, [incident], problem)
    return VerifyReport(
        version="1",
        started="2026-01-01T00:00:00+00:00",
        took_s=3.0,
        model="m",
        url=None,
        flags={"dtype": "float32"},
        speculative_config={"method": "ngram"},
        temperature=0.5,
        questions=[Question("a prompt", {Sampling.GREEDY: 3, Sampling.SAMPLED: 0})],
        results=results,
        faults=[fault],
        drafts=DraftStats(2, 8, 4, (2, 1, 1, 0)),
        notes=["a note"],
    )


def test_verdicts() -> None:
    assert report().verdict is Verdict.EQUAL
    assert report(problem="too short").verdict is Verdict.NOT_SHOWN
    assert report(problem="too short", wrong=True).verdict is Verdict.DIFFERENT
    assert [verdict.exit_status for verdict in Verdict] == [0, 1, 2]


def test_the_table_has_both_ways_side_by_side() -> None:
    first, _, third, *rest = rows(report())
    assert first == ("greedy", "alone", "ref.", "1 of 1", "3.3", "6.7", "2.00", "0.50 s")
    assert third == ("greedy", "worker killed", "1 of 1", "1 of 1", "-", "-", "-", "0.50 s")
    assert {row[0] for row in rest} == {"sampled"}


def test_without_speculation_there_is_one_side() -> None:
    whole = report()
    alone = replace(whole, results=[r for r in whole.results if not r.case.speculation])
    assert next(rows(alone))[3:7] == ("-", "3.3", "-", "-")


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
    assert document["speedup"]["greedy, alone"] == pytest.approx(2.0)
    (difference,) = document["cases"][-1]["differences"]
    assert difference["place"] == {"choice": 0, "position": 1, "expected": 2, "got": 7}
    assert document["faults"][0]["incidents"][0]["cause"] == "worker_exit"
    assert document["drafts"]["acceptance_per_position"] == [1, 0.5, 0.5, 0]
    html = to_html(shown)
    for text in (
        "DIFFERENT: of 6 answers 1 differ, 0 were lost",
        "worker_exit",
        "a note",
        "float32",
    ):
        assert text in html


def test_only_processes_of_its_own_are_struck() -> None:
    assert descends(os.getpid(), os.getppid())
    assert not descends(os.getppid(), os.getpid())
    assert not descends(1 << 22, os.getpid())
    with pytest.raises(Unavailable, match="no process that this command has started"):
        strike(WorkerRank("s", 0, os.getppid()), signal.SIGKILL, os.getpid())


def test_acceptance_of_nothing() -> None:
    assert DraftStats().rates() == []
    assert DraftStats(4, 8, 4, (3, 1)).since(DraftStats(2, 4, 1, (1,))) == DraftStats(
        2, 4, 3, (2, 1)
    )
