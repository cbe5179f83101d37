"""Choose what is looked up, loaded and stored in the tiers behind the block pool.

A request that is next and wants blocks that the pool lacks asks the tiers for them, once. Those
that they have are loaded into blocks that it would be given anyway, and published: it is admitted
like a request whose prefix was cached, and its plan says so. Meanwhile it waits, and others step.
Blocks and snapshots are stored when nothing uses them any more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from surestep_scheduler.cache.log import KEY_BYTES
from surestep_scheduler.cache.prefix import Snapshot, group_of, in_group
from surestep_scheduler.cache.tiers import (
    Action,
    Answer,
    BlockLine,
    Known,
    Order,
    Quest,
    SnapshotLine,
    Stage,
    release,
)
from surestep_scheduler.core.sequence import Sequence
from surestep_scheduler.core.slots import usable_prefix, wanted_keys
from surestep_scheduler.core.state import SchedulerState

_BATCH = 32  # blocks of an order to store
_MOST_STORES = 4  # under way
_STORE_S = 10.0  # for workers to copy what they are to store
_LOAD_S = 5.0  # for them to load, where steps were not measured
_LEAST_LOAD_S = 0.5
_HELD_SHARE = 8  # of the pool, a part that may be held to be stored


def waits(state: SchedulerState, seq: Sequence) -> bool:
    """Let a request go on with its question to the tiers; return whether it waits for an answer."""
    quest = state.tiers.quests.get(seq.request.id)
    if quest is None:
        return not state.poison.candidates and _ask(state, seq)
    return quest.stage is Stage.FOUND and _load(state, seq, quest)


def _ask(state: SchedulerState, seq: Sequence) -> bool:
    keys, limits = wanted_keys(seq, state.limits), state.limits
    cached = state.lookup(seq).cached.num_blocks
    if len(keys) == cached:
        return False
    if not state.applied_step:  # workers take orders from then on
        return True
    blocks = [
        BlockLine(key, group)
        for group in range(len(limits.kv_windows))
        for key in in_group(group, keys)
        if state.pool.lookup(key) is None
    ]
    snapshots = list[SnapshotLine]()
    if limits.usable_snapshots:
        border = limits.snapshot_border // limits.block_size
        ends = range(max(cached // border, 1) * border, len(keys) + 1, border)
        lines = (SnapshotLine(keys[end - 1], end) for end in ends)
        snapshots += (line for line in lines if state.snapshots.pool.lookup(line.key) is None)
    state.tiers.quests[seq.request.id] = Quest(cached_len=cached * limits.block_size)
    state.tiers.order(
        Action.LOOK_UP,
        blocks=tuple(blocks),
        snapshots=tuple(snapshots),
        request_id=seq.request.id,
    )
    return True


class _Reach(NamedTuple):
    """A prefix that can be gone on from once some of it is loaded."""

    keys: Seq[bytes]  # of its blocks
    here: list[int]  # blocks of it in the pool
    missing: list[tuple[bytes, int]]  # keys of the others, with their groups
    snapshot_id: int  # 0: it has none here


def _reach(state: SchedulerState, seq: Sequence, quest: Quest) -> _Reach:
    limits, keys = state.limits, wanted_keys(seq, state.limits)
    known = Known(state.pool, quest.blocks)
    found: Snapshot = usable_prefix(keys, known, state.snapshots, limits, quest.snapshots)
    here, missing = list[int](), list[tuple[bytes, int]]()
    for group, window in enumerate(limits.kv_windows):
        first = limits.groups.first_block(window, found.num_blocks * limits.block_size)
        for key in in_group(group, keys[first : found.num_blocks]):
            block = state.pool.lookup(key)
            if block is None:
                missing.append((key, group))
            else:
                here.append(block)
    return _Reach(keys[: found.num_blocks], here, missing, found.id)


def _load(state: SchedulerState, seq: Sequence, quest: Quest) -> bool:
    """Load what there is of a request's prefix if there is room; return whether it waits."""
    local, pool, snapshots = state.lookup(seq), state.pool, state.snapshots.pool
    if local.missing > 0:  # nor could it be admitted
        return False
    reach = _reach(state, seq, quest)
    quest.stage = Stage.SETTLED
    wants_snapshot = state.limits.recurrent and not reach.snapshot_id
    revived = pool.num_cached(reach.here)
    no_room = len(reach.missing) + revived + state.headroom > pool.num_available
    no_room = no_room or (wants_snapshot and not snapshots.num_available)
    if len(reach.keys) <= local.cached.num_blocks or no_room:
        return False
    loading = state.tiers.loading
    busy = state.tiers.num_under_way(Action.LOAD) >= len(state.free_slots)
    if busy or any(key in loading for key, _ in reach.missing):  # which others wait for, too
        quest.stage = Stage.FOUND
        return True
    quest.stage = Stage.LOADING
    pool.acquire(reach.here)
    held = [reach.snapshot_id] if reach.snapshot_id else []
    snapshots.acquire(held)
    ids = pool.allocate(len(reach.missing))
    blocks = (BlockLine(key, group, i) for (key, group), i in zip(reach.missing, ids, strict=True))
    taken = list[SnapshotLine]()
    if wants_snapshot:
        taken = [SnapshotLine(reach.keys[-1], len(reach.keys), state.snapshots.allocate())]
    state.tiers.order(
        Action.LOAD,
        blocks=tuple(blocks),
        snapshots=tuple(taken),
        request_id=seq.request.id,
        held_blocks=tuple(reach.here),
        held_snapshots=tuple(held),
        timeout_s=_worth_s(state, len(reach.keys) * state.limits.block_size - quest.cached_len),
    )
    return True


def _worth_s(state: SchedulerState, num_tokens: int) -> float:
    """Return in how many seconds so many tokens would be computed: loading may take no longer."""
    costs, most = state.limits.costs, state.limits.max_num_batched_tokens
    if costs is None:
        return _LOAD_S
    context_us = costs.per_context_token * num_tokens / 2
    return float(max(1e-6 * num_tokens * (costs.step[most] / most + context_us), _LEAST_LOAD_S))


def store_idle(state: SchedulerState) -> None:
    """Have tiers store what has come to rest in the pool."""
    if not state.applied_step:
        return
    most_held = max(state.pool.num_blocks // _HELD_SHARE, 1)
    while state.tiers.num_under_way(Action.STORE) < _MOST_STORES:
        room = most_held - state.tiers.num_held
        found = state.pool.unstored(max(min(_BATCH, room), 0))
        snapshots = _idle_snapshots(state)
        if not found and not snapshots:
            return
        state.pool.acquire([block for block, _, _ in found])
        state.snapshots.pool.acquire([line.id for line in snapshots])
        blocks = (BlockLine(key, group_of(key), block, drafted) for block, key, drafted in found)
        what = {"blocks": tuple(blocks), "snapshots": tuple(snapshots)}
        state.tiers.order(Action.STORE, **what, timeout_s=_STORE_S)


def _idle_snapshots(state: SchedulerState) -> list[SnapshotLine]:
    """Return snapshots to be stored: of a request that decodes none, the next one replaces it."""
    if not state.snapshots.num_ids:
        return []
    passing = set(state.slots.snapshot_key[state.slots.open].tolist())
    found = state.snapshots.pool.unstored(state.snapshots.num_ids)
    lines = (SnapshotLine(key, state.snapshots.num_blocks(i), i) for i, key, _ in found)
    return [line for line in lines if line.key not in passing][:1]


def settle(state: SchedulerState, answer: Answer) -> None:
    """Enter what the workers have done for an order. Raises LedgerError for an unknown one."""
    order = state.tiers.answered(answer.number)
    quest = state.tiers.quests.get(order.request_id)
    if order.action is Action.LOOK_UP and quest is not None:
        _found(order, answer, quest)
    elif order.action is Action.LOAD:
        _loaded(state, order, answer)
        if quest is not None:
            quest.stage = Stage.SETTLED
    elif order.action is Action.STORE:
        _stored(state, order, answer)
    release(order, state.pool, state.snapshots)
    if order.action is Action.STORE:  # what was refused has another chance when it is used again
        state.pool.pass_over(line.id for line in order.blocks)
        state.snapshots.pool.pass_over(line.id for line in order.snapshots)


def _found(order: Order, answer: Answer, quest: Quest) -> None:
    blocks = zip(order.blocks, answer.blocks.tolist(), strict=True)
    snapshots = zip(order.snapshots, answer.snapshots.tolist(), strict=True)
    quest.blocks = frozenset(line.key for line, found in blocks if found)
    quest.snapshots = frozenset(line.key for line, found in snapshots if found)
    quest.stage = Stage.FOUND if quest.blocks or quest.snapshots else Stage.SETTLED


def _loaded(state: SchedulerState, order: Order, answer: Answer) -> None:
    """Publish what was loaded whole."""
    columns = answer.blocks.tolist(), answer.drafted.tolist()
    for line, whole, drafted in zip(order.blocks, *columns, strict=True):
        if not whole:
            continue
        if state.pool.publish(line.id, line.key) and state.pool.log is not None:
            _tell_loaded(state, order, line)
        if drafted and len(line.key) == KEY_BYTES:
            state.pool.mark_drafted([line.id])
        state.pool.mark_stored(line.id, drafted=drafted)
    for snapshot, whole in zip(order.snapshots, answer.snapshots.tolist(), strict=True):
        if whole:
            state.snapshots.publish(snapshot.id, snapshot.key, snapshot.num_blocks)
            state.snapshots.pool.mark_stored(snapshot.id, drafted=False)


def _tell_loaded(state: SchedulerState, order: Order, line: BlockLine) -> None:
    """Log what was loaded, if the request that knows its tokens is still there."""
    seq, log = state.open.get(order.request_id), state.pool.log
    if seq is None or log is None:
        return
    keys = in_group(line.group, wanted_keys(seq, state.limits))
    entry = next((entry for entry, key in enumerate(keys) if key == line.key), None)
    if entry is not None:
        log.stored(seq.chain.content(seq.tokens, entry, line.group))


def _stored(state: SchedulerState, order: Order, answer: Answer) -> None:
    for line, stored in zip(order.blocks, answer.blocks.tolist(), strict=True):
        if stored:
            state.pool.mark_stored(line.id, drafted=line.drafted)
    for snapshot, stored in zip(order.snapshots, answer.snapshots.tolist(), strict=True):
        if stored:
            state.snapshots.pool.mark_stored(snapshot.id, drafted=False)
    state.counters.tier_stored += int(answer.blocks.sum())
