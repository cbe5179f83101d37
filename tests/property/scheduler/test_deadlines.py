"""Deadlines of steps: no false alarm, and a hang is noticed in time, whatever was in flight."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_scheduler.core.messages import Plan
from surestep_scheduler.engine.steps import StepMonitor, classify
from surestep_scheduler.recovery.deadline import StepClass, StepKind, StepTimer
from surestep_scheduler.speculation.learnt_costs import Expected

FLOOR_S, CEILING_S, WARMUP_S = 3.0, 30.0, 60.0
CLASSES = st.builds(StepClass, st.sampled_from(StepKind), st.integers(1, 12))
DURATIONS = st.floats(1e-4, 40.0)


def timer() -> StepTimer:
    return StepTimer(floor_s=FLOOR_S, ceiling_s=CEILING_S, warmup_s=WARMUP_S)


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
    budget_s = steps.budget_s(asked)
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
    budgets = [steps.budget_s(StepClass(StepKind.PROMPT, size)) for size in range(1, 9)]
    assert budgets == [4, 4, 4, 4, 4, 8, 16, 30]
    assert steps.budget_s(StepClass(StepKind.DECODE, 1)) == WARMUP_S


def test_budgets_double_while_nothing_comes_back_at_all() -> None:
    steps, step = timer(), StepClass(StepKind.DECODE, 1)
    steps.observe(step, 0.01)
    budgets = []
    for _ in range(6):
        steps.missed()
        budgets.append(steps.budget_s(step))
    assert budgets == [3, 6, 12, 24, 30, 30]
    steps.observe(step, 0.01)
    assert steps.budget_s(step) == FLOOR_S


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    depth=st.integers(0, 2),
    steps=st.lists(
        st.tuples(st.integers(0, len(PLANS) - 1), st.floats(0.001, 0.999), st.floats(0, 2)),
        min_size=1,
        max_size=40,
    ),
    hung_for=st.integers(0, 3),
)
def test_a_hang_is_found_within_its_deadline(
    depth: int, steps: list[tuple[int, float, float]], hung_for: int
) -> None:
    """Each step takes a share of its budget, then one hangs, with up to two more behind it."""
    monitor, now, ended = StepMonitor(timer()), 0.0, 0.0
    in_flight: list[tuple[float, float, float]] = []  # sent at, budget, share
    monitor.open_epoch()
    for index, share, idle_s in steps:
        now += idle_s * (not in_flight)
        in_flight.append((now, monitor.sent(PLANS[index], Expected(), now).budget_s, share))
        if len(in_flight) > depth:
            sent_at, budget_s, share = in_flight.pop(0)
            now = ended = max(sent_at, ended) + share * budget_s
            assert now <= monitor.due_at
            monitor.answered(0.0, now)
    monitor.sent(PLANS[hung_for % len(PLANS)], Expected(), now)
    in_flight.append((now, monitor.oldest_budget_s, 1.0))
    sent_at, budget_s, _ = in_flight[0]
    assert math.isclose(monitor.due_at, max(sent_at, ended) + budget_s)
    assert math.isclose(monitor.silent_s(monitor.due_at), budget_s)
    assert monitor.extend_deadline(monitor.due_at + 1)
    assert monitor.due_at > max(sent_at, ended) + budget_s + 0.99
    assert not monitor.extend_deadline(monitor.due_at + 1)
