"""Prefixes of recurrent models are cached as far as there is a snapshot of the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fakes.loop import FakeLoop, hopeless
from support.fakes.model import FakeModel, ragged
from surestep_common.invariants import LedgerError
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.sequence import Tenancy
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule

MODEL = FakeModel(recurrent=True, num_snapshots=12, max_step_tokens=32)
SIZE = MODEL.block_size


def prompt(length: int, tail: int = 0) -> list[int]:
    return [i % 90 for i in range(length - 1)] + [90 + tail]


def admitted(loop: FakeLoop) -> Tenancy:
    """The newest admission."""
    return next(plan.admissions[-1] for plan in reversed(loop.plans) if plan.admissions)


def cached(loop: FakeLoop) -> int:
    return admitted(loop).num_cached


@pytest.mark.parametrize("length", range(1, 4 * SIZE + 2))
def test_the_last_boundary_of_a_prompt_can_be_gone_on_from(length: int) -> None:
    """At every offset within a block; the third request equals the first (A/B/A)."""
    loop = FakeLoop(MODEL)
    loop.complete(prompt(length), 3)
    for tail in (1, 0):
        loop.complete(prompt(length, tail), 3)
        assert cached(loop) == (length - 1) // SIZE * SIZE


def test_a_prefix_is_cached_up_to_the_chunk_that_it_shares() -> None:
    """Blocks reach further than snapshots: the shorter of the two counts."""
    loop = FakeLoop(MODEL)
    loop.complete(prompt(80), 3)
    loop.complete(prompt(60), 3)
    assert cached(loop) == 32  # end of the first chunk; 56 tokens have blocks


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_next_turn_starts_near_the_end_of_the_answer(depth: int) -> None:
    loop = FakeLoop(MODEL, depth=depth)
    turn = loop.complete(prompt(30), 41)
    loop.complete([*turn, 1, 2, 3], 5)
    interval = (depth + 1) * (MODEL.max_draft_tokens + 1)
    # The newest token is not in the state, and the window before it is only recorded.
    assert cached(loop) > len(turn) - 1 - (MODEL.max_draft_tokens + 1) - interval


def test_one_snapshot_is_kept_of_a_request_that_decodes() -> None:
    loop = FakeLoop(MODEL)
    loop.complete(prompt(30), 60)
    pool = loop.state.snapshots.pool
    assert loop.state.counters.snapshots_taken > 10
    assert MODEL.num_snapshots - pool.num_free == 2  # the prompt's and the newest


def test_snapshots_while_decoding_keep_their_distance() -> None:
    loop = FakeLoop(MODEL, snapshot_interval=4 * SIZE - 1)
    loop.complete(prompt(10), 100)
    lengths = sorted({int(n) for plan in loop.plans[1:] for n in plan.snapshot_requests.length})
    assert lengths == [16, 32, 48, 64, 80, 96]


@pytest.mark.parametrize("depth", [1, 2])
def test_ids_that_may_be_taken_by_either_of_two_plans_are_shared(depth: int) -> None:
    loop = FakeLoop(MODEL, depth=depth, drafter=ragged(0.5))
    loop.complete(prompt(30), 60)
    by_length: dict[int, set[int]] = {}
    for plan in loop.plans:
        for length, snapshot in zip(
            plan.snapshot_requests.length.tolist(), plan.snapshot_requests.id.tolist(), strict=True
        ):
            by_length.setdefault(length, set()).add(snapshot)
    assert sum(len(plan.snapshot_requests.id) for plan in loop.plans) > len(by_length)
    assert all(len(ids) == 1 for ids in by_length.values())
    assert len(by_length) - loop.state.counters.snapshots_taken in (0, 1)


def test_the_least_recently_used_is_given_up() -> None:
    loop = FakeLoop(replace(MODEL, num_snapshots=2))
    first, second, third = ([start] * 9 for start in (1, 2, 3))
    for tokens in (first, second, first, third, first):
        loop.complete(tokens, 1)
    assert cached(loop) == 8
    assert loop.state.counters.snapshot_evictions == 1
    loop.complete(second, 1)
    assert cached(loop) == 0


@pytest.mark.parametrize(
    "changes", [{"num_snapshots": 0}, {"enable_prefix_caching": False}], ids=str
)
def test_no_snapshots_no_hits(changes: dict[str, Any]) -> None:
    loop = FakeLoop(MODEL, **changes)
    for _ in range(2):
        loop.complete(prompt(20), 5)
        assert (cached(loop), admitted(loop).snapshot_id) == (0, 0)
    assert not any(len(plan.snapshot_requests.id) for plan in loop.plans)


def test_figures() -> None:
    loop = FakeLoop(MODEL)
    for _ in range(3):
        loop.complete(prompt(20), 1)
    counters = loop.state.counters
    assert (counters.snapshot_queries, counters.snapshot_hits) == (3, 2)
    assert (counters.snapshots_taken, counters.snapshot_evictions) == (1, 0)


def test_a_restored_id_is_not_reused_before_the_admission_is_answered() -> None:
    loop = FakeLoop(replace(MODEL, num_snapshots=1), depth=2)
    loop.complete(prompt(9), 1)
    loop.add(prompt(9, 1), 3)
    loop.add([5] * 9, 3)
    plans = [schedule(loop.state, now=0.0) for _ in range(2)]
    loop.state.abort(loop.state.running[0].seq)
    assert plans[0] is not None
    assert plans[0].admissions[0].snapshot_id == 1
    assert not any(len(plan.snapshot_requests.id) for plan in plans if plan is not None)
    loop.state.check()
    assert loop.state.snapshots.pool.num_available == 0
    commit_result(loop.state, from_proto([loop.engine.execute(to_proto(plans[0], 1000))]))
    assert loop.state.snapshots.pool.num_available == 1


@pytest.mark.parametrize("denied", [True, False])
def test_a_report_that_differs_is_refused(denied: bool) -> None:
    loop = FakeLoop(MODEL, depth=1, drafter=hopeless)
    loop.add(prompt(9), 60)
    loop.step()
    plan, result = loop.unanswered[0]
    while not len(plan.snapshot_requests.id) or bool(result.snapshot_ids_taken) != denied:
        loop.step()
        plan, result = loop.unanswered[0]
    result.snapshot_ids_taken[:] = [] if denied else plan.snapshot_requests.id.tolist()
    with pytest.raises(LedgerError, match="snapshot"):
        commit_result(loop.state, from_proto([result]))
