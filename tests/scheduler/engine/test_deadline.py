"""Deadlines of steps: no false alarm, and a hang is noticed in time, whatever was in flight."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_proto import supervisor_pb2 as pb
from surestep_scheduler.core.messages import Plan
from surestep_scheduler.engine.steps import (
    SHARES,
    Sent,
    StepClass,
    StepKind,
    StepMonitor,
    StepTimer,
    classify,
)
from surestep_scheduler.speculation.draft_length import Expected

FLOOR_S, CEILING_S, WARMUP_S = 3.0, 30.0, 60.0
CLASSES = st.builds(StepClass, st.sampled_from(StepKind), st.integers(1, 12))
DURATIONS = st.floats(1e-4, 40.0)


def timer() -> StepTimer:
    return StepTimer(floor_s=FLOOR_S, ceiling_s=CEILING_S, warmup_s=WARMUP_S)


def longest_s(steps: StepTimer, step: StepClass) -> float:
    """The time for a step of whose workers nothing is known."""
    return steps.budgets_s(step)[pb.ACTIVITY_UNKNOWN]


def plans() -> list[Plan]:
    """Prompts, drafts and plain decoding."""
    loop = FakeLoop(FakeModel(max_step_tokens=64))
    loop.add([1] * 90, 9)
    loop.add([2] * 5, 4, draft_cap=0)
    loop.run()
    loop.complete([3] * 5, 5, draft_cap=0)
    assert {classify(plan).kind for plan in loop.plans} == set(StepKind)
    return loop.plans


PLANS = plans()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seen=st.lists(st.tuples(CLASSES, DURATIONS), max_size=30), asked=CLASSES)
def test_budgets_keep_their_bounds(seen: list[tuple[StepClass, float]], asked: StepClass) -> None:
    steps = timer()
    for step, took_s in seen:
        steps.observe(step, took_s)
    budget_s = longest_s(steps, asked)
    kinds = {step.kind: max(s for other, s in seen if other.kind == step.kind) for step, _ in seen}
    if asked.kind not in kinds:
        assert budget_s == WARMUP_S
        return
    assert budget_s >= FLOOR_S
    # Nothing larger was seen: what was took its longest, and grows with the size at most.
    assert budget_s <= max(CEILING_S, 2 * kinds[asked.kind] * 2**12)
    same = [took_s for step, took_s in seen if step == asked]
    if same and len(set(same)) == 1:
        assert budget_s >= min(8 * same[0], CEILING_S) * 0.999
        assert budget_s >= 2 * same[0] * 0.999


def test_larger_steps_get_more_time() -> None:
    steps = timer()
    steps.observe(StepClass(StepKind.PROMPT, 5), 0.5)
    budgets = [longest_s(steps, StepClass(StepKind.PROMPT, size)) for size in range(1, 9)]
    assert budgets == [4, 4, 4, 4, 4, 8, 16, 30]
    assert longest_s(steps, StepClass(StepKind.DECODE, 1)) == WARMUP_S


def test_budgets_double_while_nothing_comes_back_at_all() -> None:
    steps, step = timer(), StepClass(StepKind.DECODE, 1)
    steps.observe(step, 0.01)
    budgets = []
    for _ in range(6):
        steps.missed()
        budgets.append(longest_s(steps, step))
    assert budgets == [3, 6, 12, 24, 30, 30]
    steps.observe(step, 0.01)
    assert longest_s(steps, step) == FLOOR_S


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    depth=st.integers(0, 2),
    steps=st.lists(
        st.tuples(st.integers(0, len(PLANS) - 1), st.floats(0.001, 0.999), st.floats(0, 2)),
        min_size=1,
        max_size=40,
    ),
    hung_for=st.integers(0, 3),
    doing=st.sampled_from(sorted(SHARES.keys() - {pb.AWAITING_COMPILER})),
)
def test_a_hang_is_found_within_its_deadline(
    depth: int, steps: list[tuple[int, float, float]], hung_for: int, doing: pb.Activity
) -> None:
    """Each step takes a share of its budget, then one hangs, with up to two more behind it."""
    monitor, now, ended = StepMonitor(timer()), 0.0, 0.0
    in_flight: list[tuple[Sent, float]] = []  # and the share of its budget that it takes
    monitor.open_epoch()
    for index, share, idle_s in steps:
        now += idle_s * (not in_flight)
        in_flight.append((monitor.sent(PLANS[index], Expected(), now), share))
        if len(in_flight) > depth:
            sent, share = in_flight.pop(0)
            now = ended = max(sent.sent_at, ended) + share * sent.budget_s
            while monitor.due_at < now:
                assert monitor.has_more_time(pb.ACTIVITY_UNKNOWN, monitor.due_at + 1e-9)
            monitor.answered(0.0, now)
    in_flight.append((monitor.sent(PLANS[hung_for % len(PLANS)], Expected(), now), 1.0))
    hung, _ = in_flight[0]
    began = max(hung.sent_at, ended)
    assert math.isclose(monitor.lost_at, began + hung.budget_s)
    if doing == pb.WAITING:  # for a turn, until the ceiling
        while monitor.due_at < began + max(CEILING_S, hung.budget_s):
            assert monitor.has_more_time(doing, monitor.due_at + 1e-9)
        assert not monitor.has_more_time(doing, monitor.lost_at + 1e-9)
        return
    while monitor.has_more_time(doing, found_at := monitor.due_at + 1e-9):
        pass
    late_s = monitor.silent_s(found_at)
    assert math.isclose(late_s, hung.budgets_s[doing], abs_tol=1e-6)
    assert FLOOR_S * SHARES[doing] <= hung.budgets_s[doing] <= hung.budget_s
    assert monitor.extend_deadline(found_at + 1)
    assert monitor.due_at > found_at + 1
    assert not monitor.extend_deadline(found_at + 1)


def test_a_step_that_is_captured_first_has_more_time_and_teaches_nothing() -> None:
    monitor, (plan, *_) = StepMonitor(timer()), PLANS
    for now in range(20):
        monitor.sent(plan, Expected(), now)
        monitor.answered(0.0, now + 0.01)
    usual_s = longest_s(monitor.timer, classify(plan))
    assert usual_s < WARMUP_S
    assert monitor.sent(replace(plan, capture=1), Expected(), 30.0).budget_s == WARMUP_S
    monitor.answered(0.0, 50.0)
    assert longest_s(monitor.timer, classify(plan)) == usual_s
