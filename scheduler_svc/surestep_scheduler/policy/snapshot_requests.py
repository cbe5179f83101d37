"""Choose the snapshots of recurrent state that a plan asks for.

Of a prompt that is its last boundary of blocks and, as long as ids are free, the last one of each
chunk before; of a request that decodes the next length that it may come to. A prompt that begins
as another one did, whose state is gone, leaves a snapshot where the cached blocks end: that is
where the next one will begin to differ, as conversations with the same instructions do (Pan et al.,
"Marconi: Prefix Caching for the Era of Hybrid LLMs", 2024). Where workers compute
prompts in chunks, a boundary is one of theirs too, and what is decoded would be of no use to
others: the next turn of a conversation computes it in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, IntArray

from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Plan, PlannedSnapshots
from surestep_scheduler.core.state import SchedulerState


class _Wanted(NamedTuple):
    """Snapshots that rows [R] would like to have."""

    length: IntArray  # tokens
    wanted: BoolArray
    only_if_free: BoolArray  # no cached snapshot is given up for it


def snapshot_requests(
    state: SchedulerState, slot: IntArray, num_tokens: IntArray
) -> PlannedSnapshots:
    """Choose for rows [R] of a plan with `num_tokens` prompt tokens each, 0 = decoding."""
    cache = state.snapshots
    length, wanted, only_if_free = _wanted(state, slot, num_tokens)
    known = _ids_in_flight(state.in_flight)
    rows, ids = list[int](), list[int]()
    for row in wanted.nonzero()[0].tolist():
        snapshot = known.get((int(slot[row]), int(length[row])))
        if snapshot is not None:  # whether a row in flight comes so far is not known yet
            cache.share(snapshot)
        elif cache.pool.num_free or (cache.pool.num_available and not only_if_free[row]):
            state.counters.snapshot_evictions += not cache.pool.num_free
            snapshot = cache.allocate()
        else:
            continue
        rows.append(row)
        ids.append(snapshot)
    requested = np.array(rows, dtype=np.int64)
    return PlannedSnapshots(requested, length[requested], np.array(ids, dtype=np.int64))


def _wanted(state: SchedulerState, slot: IntArray, num_tokens: IntArray) -> _Wanted:
    slots, limits, decoding = state.slots, state.limits, num_tokens == 0
    border, start, end = limits.snapshot_border, slots.len_hi[slot], slots.len_hi[slot] + num_tokens
    prefill_len, shared_len = slots.prefill_len[slot], slots.shared_len[slot]
    last, branch = _last_boundary(state, slot), slots.branch_len[slot]
    branches = (start < branch) & (branch <= np.minimum(end, last))
    chunk = np.where(branches, branch, np.minimum(end // border * border, last))
    done = np.maximum(slots.folded[slot], prefill_len)
    interval = _interval(limits)
    following = (done // interval + 1) * interval
    length = np.where(decoding, following, chunk)
    wanted = np.where(decoding, following <= np.minimum(start, shared_len), chunk > start)
    return _Wanted(length, wanted, ~decoding & (chunk < last) & ~branches)


def up_to_branch(state: SchedulerState, slot: int, num_tokens: int) -> int:
    """Return how many of these tokens of a prompt a step may take: one step takes one snapshot."""
    start, branch = int(state.slots.len_hi[slot]), int(state.slots.branch_len[slot])
    if start < branch < int(_last_boundary(state, np.array([slot]))[0]) <= start + num_tokens:
        return branch - start
    return num_tokens


def _last_boundary(state: SchedulerState, slot: IntArray) -> IntArray:
    """Return the last length [R] at which others could go on from the prompts of these slots."""
    border = state.limits.snapshot_border
    most = np.minimum(state.slots.prefill_len[slot] - 1, state.slots.shared_len[slot])
    last: IntArray = most // border * border
    return last


def _interval(limits: Limits) -> int:
    """Tokens between snapshots of a request that decodes.

    At least what all plans in flight may commit, so that they can come to one length at most.
    """
    in_flight = (limits.pipeline_depth + 1) * (limits.max_draft_tokens + 1)
    return -(-max(limits.snapshot_interval, in_flight) // limits.block_size) * limits.block_size


def _ids_in_flight(in_flight: Iterable[Plan]) -> dict[tuple[int, int], int]:
    """Ids that plans in flight may take, by slot and length."""
    ids: dict[tuple[int, int], int] = {}
    for plan in in_flight:
        row, length, snapshot = plan.snapshot_requests
        places = zip(plan.rows.slot[row].tolist(), length.tolist(), strict=True)
        ids |= zip(places, snapshot.tolist(), strict=True)
    return ids
