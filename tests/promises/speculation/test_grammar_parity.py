"""Grammars beside the matrix: devices, ranks, what was begun elsewhere, and what was asked for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.parity.bench import NEIGHBOURS, Conditions, ParityBench, same, serve, total
from support.parity.grammars import Reader
from support.processes.ports import free_address
from support.ranks.pair import RankSetup, two_ranks
from surestep_kernels.table import STEP_REFERENCE
from surestep_scheduler.core.sequence import Finish
from surestep_scheduler.core.state import SchedulerState


def check(bench: ParityBench, answers: dict[str, Any]) -> None:
    for name, expected in bench.expected.items():
        assert same(answers[name], expected), f"{name}: {answers[name]}, not {expected}"


@pytest.mark.parametrize("drafter", ["ngram", "flip-1", "none"])
@pytest.mark.parametrize("depth", range(3))
def test_steps_as_on_a_device_change_nothing(
    guided_bench: ParityBench, drafter: str, depth: int
) -> None:
    """The host learns of tokens and drafts when it asks for them; nothing is forced there."""
    conditions = Conditions(step_ops=STEP_REFERENCE, shuffle_seed=3)
    answers = guided_bench.run("mixed", drafter=drafter, k=3, depth=depth, conditions=conditions)
    check(guided_bench, answers)
    assert (total(answers, "num_drafts") > 0) == (drafter != "none")


@pytest.mark.parametrize("drafter", ["ngram", "flip-1"])
def test_captured_steps_change_nothing(guided_bench: ParityBench, drafter: str) -> None:
    conditions = Conditions(step_ops=STEP_REFERENCE, shuffle_seed=4, graphs=True)
    answers = guided_bench.run("mixed", drafter=drafter, k=2, depth=1, conditions=conditions)
    check(guided_bench, answers)


@pytest.mark.rotates(3)
def test_two_ranks_equal_one(guided_bench: ParityBench) -> None:
    bench, where = guided_bench, NEIGHBOURS["near max_model_len"]
    setup = RankSetup(bench.folder, free_address(), where, "flip-1", 4, bench.truth, "")
    with two_ranks(setup) as (step, facts):
        answers = serve(step, facts, bench.requests, where, 2, Conditions(shuffle_seed=9))
    for name, expected in bench.expected.items():
        assert answers[name].token_ids == expected.token_ids, name
    assert total(answers, "num_drafts") > 0


def test_what_another_scheduler_began_is_gone_on_with(guided_bench: ParityBench) -> None:
    """A request comes with what was delivered; the rest of its tokens are the same."""
    rng, bench, resumed = random.Random(6), guided_bench, []
    for request in bench.requests:
        ids = bench.expected[request.id].token_ids
        emitted = ids[: rng.randrange(len(ids))]
        resumed.append(replace(request, emitted_ids=emitted, want_prompt_logprobs=False))
    answers = bench.serve(resumed, NEIGHBOURS["mixed"], "ngram", 3, 2)
    for request in resumed:
        whole = [*request.emitted_ids, *answers[request.id].token_ids]
        assert whole == bench.expected[request.id].token_ids, request.id


def test_every_answer_is_what_was_asked_for(guided_bench: ParityBench) -> None:
    reader = Reader(guided_bench.folder)
    stopped = {n: a for n, a in guided_bench.expected.items() if a.finish is Finish.STOP}
    for name, answer in stopped.items():
        reader.check(name, answer.token_ids)
    assert len(stopped) > 0.8 * len(guided_bench.expected)
    assert all(answer.error is None for answer in guided_bench.expected.values())
    assert total(stopped, "num_accepted") > len(stopped)  # of what was forced


def test_what_is_preempted_at_random_goes_on_where_it_was(guided_bench: ParityBench) -> None:
    rng = random.Random(5)

    def preempt(state: SchedulerState) -> None:
        if state.running and rng.random() < 0.2:
            state.preempt(rng.choice(state.running))

    conditions = Conditions(after_apply=preempt)
    answers = guided_bench.run("mixed", drafter="ngram", k=3, depth=2, conditions=conditions)
    check(guided_bench, answers)
    assert total(answers, "num_preemptions") > len(answers) / 3
