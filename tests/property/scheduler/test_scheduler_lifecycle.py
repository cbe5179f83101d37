"""Random lives: nothing leaks, nothing is lost, and the books always balance."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from support.parity.lifecycle import MODEL, PREFIXES, Lifecycle
from surestep_common.invariants import LedgerError
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.cache.snapshots import SnapshotCache
from surestep_scheduler.core.lookup import Lookup
from surestep_scheduler.core.messages import Plan
from surestep_scheduler.core.sequence import Sequence, Tenancy
from surestep_scheduler.core.state import SchedulerState

TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def live(
    machine: Lifecycle,
    rng: random.Random,
    *,
    depth: int,
    num_events: int,
    kind: str = "stateless",
    adaptive: bool = False,
) -> None:
    """A long life with the weights of a busy server."""
    machine.start(
        depth=depth,
        caching=rng.random() < 0.8,
        seed=rng.randrange(100),
        kind=kind,
        adaptive=adaptive,
        faulty=rng.choice([0.0, 0.2]),
    )
    weights = {
        "arrive": 6,
        "abort": 2,
        "preempt": 1,
        "displace": 1,
        "fence": 0.3,
        "deliver_dead": 1,
    }
    weights |= {"plan": 30, "execute": 30, "deliver": 30, "draft_again": 5}
    for event in rng.choices(list(weights), list(weights.values()), k=num_events):
        if event == "arrive":
            machine.arrive(**wishes(rng))
        elif event == "abort":
            machine.abort(rng.randrange(30), rng.random())
        elif event == "preempt" and machine.state.running:
            machine.preempt(rng.randrange(9))
        elif event == "displace" and machine.state.running:
            machine.displace(rng.randrange(9))
        elif event == "fence":
            machine.fence(chance=0)
        elif event == "deliver_dead" and machine.dead:
            machine.deliver_dead()
        elif event in ("plan", "execute", "deliver"):
            getattr(machine, event)()
        elif event == "draft_again" and machine.state.speculation.alarm.suspended:
            machine.draft_again()
        machine.books_balance()
    machine.teardown()


def wishes(rng: random.Random) -> dict[str, Any]:
    suffix = [rng.randrange(MODEL.vocab_size) for _ in range(rng.randint(1, 14))]
    return {
        "prompt": rng.choice(PREFIXES) + suffix,
        "pooling": rng.choice([pb.NO_POOLING, pb.NO_POOLING, pb.LAST_TOKEN, pb.MEAN]),
        "max_tokens": rng.randint(1, 40),
        "stop_ids": set(rng.sample(range(MODEL.vocab_size), rng.randrange(3))),
        "priority": rng.randint(-1, 1),
        "salt": rng.choice(["", "", "other"]),
        "draft_cap": rng.choice([None, None, 0, 1, 2]),
        "prompt_logprobs": rng.random() < 0.2,
        "resume": rng.randrange(12),
        "broken": rng.random() < 0.2,  # only the second failure ends a request
        "tenant": rng.choice(["", "", "first", "second"]),
        "weight": rng.choice([1.0, 4.0]),
    }


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("seed", "kind", "adaptive"),
    [
        (0, "stateless", False),
        (1, "drafter", False),
        (5, "recurrent", True),
        (3, "both", False),
        (4, "both", True),
    ],
)
def test_long_life(seed: int, kind: str, adaptive: bool, depth: int) -> None:
    machine = Lifecycle()
    rng = random.Random(seed)
    live(machine, rng, depth=depth, num_events=5000, kind=kind, adaptive=adaptive)
    counters = machine.state.counters
    least = min(("stop", "length", "abort", "error"), key=counters.finished.__getitem__)
    assert counters.finished[least] > 2, least
    assert counters.accepted_tokens > 20
    assert counters.preemptions > counters.displacements > 2
    assert counters.replayed_requests > 2
    if kind in ("recurrent", "both"):
        assert counters.snapshots_taken > 20
        assert counters.snapshot_hits > 2


class NoQuarantine(SchedulerState):
    """Gives slots and blocks back while plans in flight still use them."""

    def sweep(self) -> None:
        applied, self.applied_step = self.applied_step, self.planned_step
        super().sweep()
        self.applied_step = applied


class StaleCache(SchedulerState):
    """Trusts what an earlier epoch left in the workers' blocks."""

    def _reset_workers(self) -> None:
        pool = getattr(self, "pool", None)
        super()._reset_workers()
        self.pool = pool or self.pool


class LateResultsCount(SchedulerState):
    """Forgets to discard what is in flight when a tenancy ends."""

    def release(self, tenancy: Tenancy) -> None:
        super().release(tenancy)
        self.slots.open[tenancy.slot] = True


class StaleDrafterRows(SchedulerState):
    """Forgets that a block's new owner has written nothing for the drafter yet."""

    def _reset_workers(self) -> None:
        super()._reset_workers()
        vars(self.pool)["_drafted"] = _Kept([False] * self.limits.num_blocks)


class _Kept(list[bool]):
    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value or self[index])


class RestoredWithoutHold(SchedulerState):
    """Lets the id of a snapshot be reused while its admission is on its way."""

    def _reset_workers(self) -> None:
        super()._reset_workers()
        self.snapshots = _HoldsNothing(self.limits.usable_snapshots)

    def acknowledge(self, plan: Plan) -> None:
        self.in_flight[0] = without_holds = replace(plan, admissions=[])
        super().acknowledge(without_holds)


class _HoldsNothing(SnapshotCache):
    def restore(self, snapshot: int, num_blocks: int) -> None:
        pass

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        pass


class SnapshotOfAnotherLength(SchedulerState):
    """Goes on from all cached blocks but one, whatever state there is."""

    def lookup(self, seq: Sequence) -> Lookup:
        found = super().lookup(seq)
        if len(found.cached) < 2:
            return found
        return found._replace(cached=found.cached[:-1], fresh=found.fresh + 1)


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (NoQuarantine, "stateless"),
        (StaleCache, "stateless"),
        (LateResultsCount, "stateless"),
        (StaleDrafterRows, "drafter"),
        (RestoredWithoutHold, "both"),
        (SnapshotOfAnotherLength, "recurrent"),
    ],
)
def test_the_simulation_catches(mutant: type[SchedulerState], kind: str) -> None:
    caught = 0
    for seed in range(6):
        machine = Lifecycle()
        machine.state_class = mutant
        try:
            live(machine, random.Random(seed), depth=2, num_events=1000, kind=kind)
        except (AssertionError, LedgerError, KeyError):
            caught += 1
    assert caught >= 1
