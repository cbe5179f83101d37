"""Requests and models that draft badly: seldom probed, otherwise as if speculation were off."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fakes.loop import FakeLoop, hopeless, perfect
from support.fakes.model import Drafter, FakeModel
from surestep_common.invariants import DECODE, VERIFY, ResultRows
from surestep_scheduler.speculation.draft_length import Overhead, StepCosts, Took
from surestep_scheduler.speculation.estimates import THE_MODEL, AcceptanceStats, Writer
from surestep_scheduler.speculation.speculation import Alarm

MODEL = FakeModel(max_model_len=2000, num_blocks=2000, drafter_has_state=True)
CHEAP = StepCosts.measured(([1, 64], [1000, 1100]), ([1, 16], [20, 30]), 0.0, 256)
DEAR = StepCosts.measured(([1, 2], [1000, 2000]), ([1, 2], [20, 30]), 0.0, 256)


def loop(drafter: Drafter, costs: StepCosts | None, **changes: Any) -> FakeLoop:
    """Three requests that decode for a long time."""
    loop = FakeLoop(MODEL, drafter=drafter, adaptive_draft_length=True, costs=costs, **changes)
    for start in range(3):
        loop.add([start, 5, 6, 7, 8, 9], 1500)
    return loop


def windows(loop: FakeLoop) -> list[list[int]]:
    """max_drafts of the decoding rows of each step."""
    return [plan.rows.max_drafts[plan.rows.mode >= DECODE].tolist() for plan in loop.plans]


def test_good_drafts_are_taken_to_the_cap() -> None:
    busy = loop(perfect, CHEAP)
    for _ in range(30):
        busy.step()
    assert all(caps == [3, 3, 3] for caps in windows(busy)[2:])


def test_probes_take_a_small_share_of_the_time() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(500):
        busy.step()
    late = windows(busy)[100:]
    probes = [caps for caps in late if any(caps)]
    assert len(probes) >= 3
    assert all(sorted(caps) == [0, 0, 2] for caps in probes)
    # A probe costs two draft positions, the first with what the request gained since the last one.
    assert len(probes) * (20 + 20) <= 0.02 * len(late) * 1003


def test_every_request_is_probed_in_turn() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(500):
        busy.step()
    rows = [caps.index(2) for caps in windows(busy)[100:] if any(caps)]
    assert min(rows.count(row) for row in range(3)) >= len(rows) // 4


def test_overhead_of_a_step_makes_drafts_worth_more() -> None:
    """Where every step takes long whatever it carries, tokens per step are what counts."""
    chosen = []
    for actual_us in (2000, 12_000):
        busy = loop(perfect, DEAR)
        for _ in range(200):
            busy.step()
            speculation = busy.state.speculation
            speculation.overhead.observe(speculation.expected.us, actual_us)
        chosen.append(windows(busy)[-1])
    assert chosen[0] == [0, 0, 0]
    assert min(chosen[1]) >= 2


def test_between_probes_a_step_is_that_of_speculation_off() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(300):
        busy.step()
    quiet = [plan for plan in busy.plans[50:] if not plan.rows.max_drafts.any()]
    assert len(quiet) > 150
    assert all((plan.rows.mode == DECODE).all() and not plan.rows.catch_up.any() for plan in quiet)


def test_requests_that_begin_then_are_not_caught_up_in_vain() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(70):
        busy.step()
    while busy.plans[-1].rows.max_drafts.any():
        busy.step()
    seq = busy.add(list(range(20)), 50)
    plan = busy.step()
    assert plan is not None
    assert seq.tenancy in plan.tenancies
    assert not plan.rows.catch_up.any()


def test_a_drafter_that_recovers_is_used_again() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(100):
        busy.step()
    busy.engine._drafter = perfect
    for _ in range(400):
        busy.step()
        if windows(busy)[-1] == [3, 3, 3]:
            break
    assert windows(busy)[-1] == [3, 3, 3]


def test_drafts_that_cannot_pay_are_not_probed() -> None:
    """They are tried, all rows together: what costs say may be wrong."""
    busy = loop(perfect, DEAR)
    for _ in range(900):
        busy.step()
    tried = [caps for caps in windows(busy) if any(caps)]
    assert 0 < len(tried) <= 10
    assert sum(map(all, tried)) > len(tried) // 2


def looking_up(*, alone: bool = False, **changes: Any) -> FakeLoop:
    """Decode with a drafter that looks up first, whose passes would cost as much as ten steps, or
    with one that does nothing else."""
    dear = StepCosts.measured(([1, 64], [1000, 4000]), ([1, 16], [10_000] * 2), 0.0, 256)
    model = replace(MODEL, drafter_looks_up=True, drafter_has_state=not alone)
    busy = FakeLoop(model, adaptive_draft_length=True, costs=dear, **changes)
    for start in range(3):
        busy.add([start, 5, 6, 7, 8, 9], 1500)
    for _ in range(200):
        busy.step()
    return busy


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_looked_up_is_verified_though_the_drafter_is_too_dear(alone: bool) -> None:
    busy = looking_up(drafter=perfect, alone=alone)
    assert all(caps == [3, 3, 3] for caps in windows(busy)[2:])
    assert alone or not any(plan.rows.max_proposed.any() for plan in busy.plans)
    assert not any(plan.rows.catch_up.any() for plan in busy.plans[2:])
    found = [sum(result.n_looked_up) for result in busy.results]
    assert any(found)
    assert found == [sum(result.n_drafts) for result in busy.results]


@pytest.mark.parametrize("alone", [False, True])
def test_lookups_that_find_what_is_wrong_are_only_probed(alone: bool) -> None:
    late = windows(looking_up(drafter=hopeless, alone=alone))[60:]
    assert 0 < sum(map(any, late)) <= len(late) // 8
    assert all(sorted(caps) in ([0, 0, 0], [0, 0, 2]) for caps in late)


def test_a_request_is_looked_up_until_it_has_found_too_little() -> None:
    """What others did not find says nothing of a new one; its own vain lookups do."""
    speculation = looking_up(drafter=perfect, alone=True).state.speculation
    slots, caps, zeros = np.arange(3), np.full(3, 3), np.zeros(3, dtype=np.int64)
    no = zeros > 0
    vain = ResultRows(~no, no, zeros + 50, zeros, zeros, zeros + 1, zeros, zeros, zeros)
    for slot in range(3):
        speculation.admit(slot, AcceptanceStats())
    asked = []
    for _ in range(200):
        looked_up = speculation.lengths(slots, caps, vain.len_before, zeros, 3).looked_up > 0
        speculation.finds.observe(slots[looked_up], no[looked_up])
        took = Took(2000.0, 300.0 * looked_up.any())
        us = sum(took)
        speculation.took(speculation.expected, us, us, took, vain)
        asked.append(bool(looked_up.all()))
    assert asked[:5] == [True] * 5
    assert not any(asked[-20:])
    speculation.admit(1, AcceptanceStats())
    assert speculation.lengths(slots, caps, vain.len_before, zeros, 3).looked_up[1]


def test_the_drafter_is_judged_by_its_own_drafts() -> None:
    speculation = looking_up(drafter=perfect).state.speculation
    slots, drafts = np.arange(3), np.full(3, 2)
    for _ in range(40):
        speculation.observe(slots, drafts, np.zeros(3, dtype=np.int64), np.full(3, False))
    assert (speculation.proposed.acceptance.of(slots) < 0.1).all()
    assert (speculation.looked_up.acceptance.of(slots) > 0.8).all()


@pytest.mark.parametrize("missed", [THE_MODEL, Writer(2, "a")], ids=["the model", "an adapter"])
def test_drafts_that_miss_one_writer_are_not_taken_from_others(missed: Writer) -> None:
    """Not by what is known of all requests, nor by the alarm; an adapter that comes is met anew."""
    speculation = loop(perfect, CHEAP).state.speculation
    slots, caps, zeros = np.arange(3), np.full(3, 3), np.zeros(3, dtype=np.int64)
    writers = [THE_MODEL, Writer(2, "a"), Writer(1, "b")]

    def first_drafts() -> list[int]:
        for slot, writer in enumerate(writers):
            speculation.admit(slot, AcceptanceStats(), writer)
        return [*map(int, speculation.lengths(slots, caps, zeros + 50, zeros, 3).proposed)]

    assert first_drafts() == [3, 3, 3]
    mine = np.full(100, writers.index(missed))
    for _ in range(6):
        speculation.observe(mine, mine * 0 + 2, mine * 0, mine < 0)
    assert first_drafts() == [0 if writer == missed else 3 for writer in writers]
    assert speculation.alarm.suspended == (missed is THE_MODEL)
    writers[1] = Writer(2, "c")
    assert first_drafts()[1:] == [3, 3]
    speculation.suspend("the drafter failed")
    assert first_drafts() == [0, 0, 0]


def test_without_measured_costs_the_cap_is_drafted() -> None:
    busy = loop(hopeless, None)
    for _ in range(60):
        busy.step()
    assert all(caps == [3, 3, 3] for caps in windows(busy)[1:])


def test_what_is_known_of_a_request_outlives_its_tenancy() -> None:
    busy = loop(hopeless, CHEAP)
    for _ in range(40):
        busy.step()
    tenancy = busy.state.running[0]
    busy.state.preempt(tenancy)
    known = tenancy.seq.acceptance_stats
    assert known.trials > 1
    assert known.hits == 0
    busy.step()
    assert tenancy.seq.tenancy is not None
    assert busy.state.speculation.release(tenancy.seq.tenancy.slot) == known


@pytest.mark.parametrize(("slope", "constant_us"), [(1.0, 0.0), (1.0, 5000.0), (2.0, 4000.0)])
def test_overhead_is_the_constant_in_units_of_the_slope(slope: float, constant_us: float) -> None:
    rng, overhead = random.Random(8), Overhead()
    for _ in range(500):
        expected_us = rng.uniform(3000, 9000)
        overhead.observe(expected_us, slope * expected_us + constant_us + rng.gauss(0, 100))
    assert overhead.us == pytest.approx(constant_us / slope, abs=400)


def test_steps_of_one_size_show_no_slope() -> None:
    overhead = Overhead()
    for _ in range(100):
        overhead.observe(4000.0, 6000.0)
        overhead.observe(4000.0, 900_000.0)  # interrupted
    assert overhead.us == pytest.approx(2000.0)


def test_collapse_suspends_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    busy = FakeLoop(MODEL, drafter=hopeless, adaptive_draft_length=True)
    alarm = busy.state.speculation.alarm
    with caplog.at_level(logging.WARNING):
        while len(busy.plans) < 1200:
            if len(busy.state.open) < (1 if alarm.suspended else 4):
                busy.add([1, 2, 3], 40)
            busy.step()
    assert alarm.suspended
    assert alarm.num_suspensions == 1
    (record,) = caplog.records
    assert "suspended" in record.message
    drafting = [VERIFY in plan.rows.mode for plan in busy.plans]
    first_pause = drafting[100:1000]
    assert drafting[50]
    assert not any(first_pause)
    assert any(drafting[1000:]), "tried again after the pause"


def test_alarm_ends_when_drafts_are_accepted_again() -> None:
    alarm = Alarm()
    alarm.observe(0, 300, step=1)
    assert not alarm.allows(1000)
    alarm.observe(50, 100, step=500)  # of plans that were on their way
    assert alarm.suspended
    assert alarm.allows(1001)
    alarm.observe(30, 70, step=1001)
    assert (alarm.suspended, alarm.allows(1002)) == (False, True)


def test_alarm_waits_longer_every_time() -> None:
    alarm, step, pauses = Alarm(), 1, []
    for _ in range(3):
        alarm.observe(0, 300, step)
        began = step
        while not alarm.allows(step):
            step += 100
        pauses.append(step - began)
    assert pauses == sorted(set(pauses))
    assert alarm.num_suspensions == 1
