"""Random lives: nothing leaks, nothing is lost, and the books always balance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from support.clients.vector_requests import POOLINGS
from support.parity.lifecycle import KINDS, MODEL, OWNERS, PREFIXES, Lifecycle
from surestep_common.invariants import IntArray, LedgerError
from surestep_common.kv_groups import KVGroups
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.cache.blocks import BlockTable
from surestep_scheduler.cache.prefix import SnapshotCache
from surestep_scheduler.cache.tiers import Answer, Order
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Extend, GiveBack, Kept, Plan
from surestep_scheduler.core.sequence import Sequence, Tenancy
from surestep_scheduler.core.slots import CachedPrefix, Lookup, Tables, fresh_blocks
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.policy import tiering

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
    tiers: bool = False,
) -> None:
    """A long life with the weights of a busy server."""
    machine.start(
        depth=depth,
        caching=rng.random() < 0.8,
        seed=rng.randrange(100),
        kind=kind,
        adaptive=adaptive,
        faulty=rng.choice([0.0, 0.2]),
        tiers=tiers,
    )
    weights = {
        "arrive": 6,
        "abort": 2,
        "preempt": 1,
        "displace": 1,
        "fence": 0.3,
        "deliver_dead": 1,
    }
    weights |= {"plan": 30, "execute": 30, "deliver": 30, "draft_again": 5, "move": 20}
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
        elif event in ("plan", "execute", "deliver", "move"):
            getattr(machine, event)()
        elif event == "draft_again" and machine.state.speculation.alarm.suspended:
            machine.draft_again()
        machine.books_balance()
    machine.teardown()


def wishes(rng: random.Random) -> dict[str, Any]:
    suffix = [rng.randrange(MODEL.vocab_size) for _ in range(rng.randint(1, 14))]
    return {
        "prompt": rng.choice(PREFIXES) + suffix,
        "pooling": rng.choice([pb.NO_POOLING, pb.NO_POOLING, *POOLINGS.values()]),
        "max_tokens": rng.randint(1, 40),
        "stop_ids": set(rng.sample(range(MODEL.vocab_size), rng.randrange(3))),
        "priority": rng.randint(-1, 1),
        "salt": rng.choice(["", *OWNERS]),
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
        (6, "window", False),
        (7, "windows alone", True),
        (8, "window and states", False),
    ],
)
@pytest.mark.rotates(3)
def test_long_life(seed: int, kind: str, adaptive: bool, depth: int) -> None:
    rng, unmet = random.Random(seed), list[list[str]]()
    for _ in range(5):  # each balances its books; one of them meets everything
        machine = Lifecycle()
        live(machine, rng, depth=depth, num_events=5000, kind=kind, adaptive=adaptive)
        unmet.append(not_met(machine, kind))
        if not unmet[-1]:
            return
    pytest.fail(f"{unmet}")


def not_met(machine: Lifecycle, kind: str) -> list[str]:
    """Return the events of which a life has had too few to say anything."""
    counters, limits = machine.state.counters, machine.state.limits
    reasons = "stop", "length", "abort", "error"
    keeps = limits.enable_prefix_caching and not limits.recurrent
    snapshots = kind in ("recurrent", "both")
    enough = {
        **{reason: counters.finished[reason] > 2 for reason in reasons},
        "accepted drafts": counters.accepted_tokens > 20,
        "preemptions": counters.preemptions > counters.displacements > 2,
        "replays": counters.replayed_requests > 2,
        "kept blocks": machine.num_kept > 5 or not keeps,
        "snapshots": counters.snapshots_taken > 20 or not snapshots,
        "hits of snapshots": counters.snapshot_hits > 2 or not snapshots,
    }
    return [name for name, had in enough.items() if not had]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(4, always=("both-2", "window-0"))
def test_long_life_with_tiers(kind: str, depth: int) -> None:
    machine, rng = Lifecycle(), random.Random(17)
    while True:  # until one has a prefix cache
        live(machine, rng, depth=depth, num_events=3000, kind=kind, tiers=True)
        if machine.state.limits.enable_prefix_caching:
            break
    useful = kind != "no snapshots"
    assert (machine.tiers.num_stored > 50) == useful
    assert (machine.state.counters.tier_hits > 20) == useful


def all_was_loaded(answer: Answer) -> Answer:
    return answer._replace(blocks=np.ones_like(answer.blocks))


def all_has_drafter_rows(answer: Answer) -> Answer:
    return answer._replace(drafted=answer.blocks)


def all_snapshots_were_loaded(answer: Answer) -> Answer:
    return answer._replace(snapshots=np.ones_like(answer.snapshots))


@pytest.mark.parametrize(
    ("believes", "kind"),
    [
        (all_was_loaded, "stateless"),
        (all_was_loaded, "window"),
        (all_has_drafter_rows, "drafter"),
        (all_snapshots_were_loaded, "recurrent"),
    ],
)
def test_tiers_are_believed_no_more_than_they_say(
    believes: Callable[[Answer], Answer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation catches a scheduler that is careless."""
    loaded = tiering._loaded

    def credulous(state: SchedulerState, order: Order, answer: Answer) -> None:
        loaded(state, order, believes(answer))

    monkeypatch.setattr(tiering, "_loaded", credulous)
    rng = random.Random(1)
    with pytest.raises((AssertionError, LedgerError, KeyError)):
        live(Lifecycle(), rng, depth=2, num_events=8000, kind=kind, tiers=True)


class NoQuarantine(SchedulerState):
    """Gives slots and blocks back while plans in flight still use them."""

    def sweep(self) -> None:
        applied, self.applied_step = self.applied_step, self.planned_step
        super().sweep()
        self.applied_step = applied


class StaleCache(SchedulerState):
    """Trusts what an earlier epoch left in the workers' blocks, which have kept nothing."""

    def forget_caches(self) -> None:
        pool, snapshots = getattr(self, "pool", None), getattr(self, "snapshots", None)
        super().forget_caches()
        self.pool, self.snapshots = pool or self.pool, snapshots or self.snapshots


class KeepsAll(SchedulerState):
    """Keeps blocks that the workers have not found whole."""

    def open_epoch(self, epoch: int, limits: Limits, kept: Kept | None = None) -> None:
        if kept is not None:
            every = np.ones_like(kept.blocks)
            kept = kept._replace(blocks=every, drafted=every)
        super().open_epoch(epoch, limits, kept)


class KeepsDrafterRows(SchedulerState):
    """Takes the drafter's rows of every block that is kept for kept."""

    def open_epoch(self, epoch: int, limits: Limits, kept: Kept | None = None) -> None:
        if kept is not None:
            kept = kept._replace(drafted=kept.blocks)
        super().open_epoch(epoch, limits, kept)


class KeepsSnapshots(SchedulerState):
    """Keeps all snapshots of recurrent state."""

    def open_epoch(self, epoch: int, limits: Limits, kept: Kept | None = None) -> None:
        if kept is not None:
            lengths = self.snapshots.lengths(limits.block_size)
            kept = kept._replace(snapshots=lengths)
        super().open_epoch(epoch, limits, kept)


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
        num_blocks, (table,), snapshot_id, _ = found.cached
        if num_blocks < 2:
            return found
        shorter = BlockTable(table.group, table.first, table.blocks[:-1])
        cached = CachedPrefix(num_blocks - 1, [shorter], snapshot_id)
        return found._replace(cached=cached, fresh=[found.num_fresh + 1])


class _ShortWindows(KVGroups):
    """Takes every window for a token shorter than it is."""

    def first_block(self, window: int, length: int) -> int:
        return super().first_block(window, length + 1)

    def first_blocks(self, window: int, lengths: IntArray) -> IntArray:
        return super().first_blocks(window, lengths + 1)


class _Untold(Tables):
    """Tells workers of what is given back with the admission only."""

    def changes(self) -> tuple[list[GiveBack], list[Extend]]:
        new = {tenancy.slot for tenancy in self._changed if not tenancy.tables[0]._told_end}
        give_backs, extends = super().changes()
        return [given for given in give_backs if given.slot in new], extends


class GivesBackTooEarly(SchedulerState):
    """Releases a block whose last position the next token still sees."""

    tables_class: type[Tables] = Tables

    def _reset_workers(self) -> None:
        super()._reset_workers()
        groups = _ShortWindows(self.limits.kv_windows, self.limits.block_size)
        self.tables = self.tables_class(groups, self.pool, self.slots)


class SecretlyGivesBackTooEarly(GivesBackTooEarly):
    """The same, without a word to the workers."""

    tables_class = _Untold

    def check(self) -> None:
        """Leave it to the tokens."""


class _Swapped(Tables):
    def changes(self) -> tuple[list[GiveBack], list[Extend]]:
        give_backs, extends = super().changes()
        return give_backs, [extend._replace(group=1 - extend.group) for extend in extends]


class TablesOfOtherGroups(SchedulerState):
    """Tells the workers the block table of one KV group for that of the other."""

    def _reset_workers(self) -> None:
        super()._reset_workers()
        self.tables = _Swapped(self.limits.groups, self.pool, self.slots)


class HitWithoutWindow(SchedulerState):
    """Goes on from what the first KV group has, with blocks for the window that hold nothing."""

    def lookup(self, seq: Sequence) -> Lookup:
        found, limits = super().lookup(seq), self.limits
        if not limits.enable_prefix_caching or seq.needs_whole_prompt or seq.num_non_finite:
            return found
        keys = seq.chain.keys(seq.tokens, 0, (len(seq.tokens) - 1) // limits.block_size)
        blocks = self.pool.leading(keys)
        if len(blocks) <= found.cached.num_blocks:
            return found
        first = limits.groups.first_block(limits.kv_windows[1], len(blocks) * limits.block_size)
        tables = [BlockTable(0, 0, blocks), BlockTable(1, first, [])]
        cached = CachedPrefix(len(blocks), tables, 0)
        fresh = fresh_blocks(cached, min(len(seq.tokens) + 1, seq.max_len - 1), limits)
        fresh[1] += len(blocks) - first
        return Lookup(cached, fresh, found.missing)


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (NoQuarantine, "stateless"),
        (StaleCache, "stateless"),
        (KeepsAll, "stateless"),
        (KeepsDrafterRows, "drafter"),
        (KeepsSnapshots, "recurrent"),
        (LateResultsCount, "stateless"),
        (StaleDrafterRows, "drafter"),
        (RestoredWithoutHold, "both"),
        (SnapshotOfAnotherLength, "recurrent"),
        (GivesBackTooEarly, "window"),
        (SecretlyGivesBackTooEarly, "window"),
        (TablesOfOtherGroups, "window"),
        (HitWithoutWindow, "window"),
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
