"""Steps without requests: shapes to capture, their padding, and steps that warm a rank up.

Shapes are few, because each takes time and memory. Which kernels a step runs, and how they are
compiled, depends on its longest row, its drafts and its sampling parameters; rows of the NULL slot
serve for that as well as any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import le
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import FloatArray, Int32Array
from surestep_kernels.choose import DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.slot_state import StepRows
from surestep_kernels.step_columns import HostColumn
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.drafters.inputs import HeadInputs

from .batch import Geometry, StepColumns
from .plan import Rows
from .slots import Slots

_OUTSIDE = 1 << 29  # longer than any window; added to a length it still fits 32 bits
_MOST_TOKENS = 1024  # larger steps keep the device busy for longer than their launches take
_LEAST_PROMPTS = 32  # tokens of the smallest step with prompts
_STOPS = 8  # stop ids per row, shared by all rows


class StepSize(NamedTuple):
    """Sizes of a step; those of a bucket are the largest of a captured shape, and the others are
    padded to them.

    There are two kinds of buckets: windows alone, and windows among prompts of any lengths.
    """

    rows: int
    window: int  # sampled positions of a row
    tokens: int  # of all rows together; the same for positions that a drafter catches up with
    longest: int  # tokens of a row
    positions: int  # sampled ones, of all rows together
    stops: int  # stop ids of all rows together


def make_bucket(rows: int, window: int, tokens: int, longest: int) -> StepSize:
    """Return a bucket with room for whatever its rows and tokens may bring along."""
    return StepSize(rows, window, tokens, longest, min(rows * window, tokens), rows * _STOPS)


def make_buckets(max_rows: int, max_window: int, max_tokens: int) -> list[StepSize]:
    """Return all buckets, the largest first, whose memory those captured later share."""
    windows = (
        make_bucket(rows, window, rows * window, window)
        for window in _doubling(max_window)
        for rows in _steps(max_rows)
        if rows * window <= max(_MOST_TOKENS, max_window)
    )
    prompts = (
        make_bucket(rows, max_window, tokens, tokens)
        for tokens in _steps(min(max_tokens, _MOST_TOKENS))
        for rows in {min(tokens, max_rows, count) for count in (8, 64, max_rows)}
        if tokens >= _LEAST_PROMPTS
    )
    return sorted({*windows, *prompts}, key=lambda b: (b.tokens, b.positions, b), reverse=True)


def in_order(buckets: Iterable[StepSize]) -> list[StepSize]:
    """Return buckets in the order in which they are tried for a step.

    Narrow windows come first: a captured drafter always fills the whole window.
    """
    return sorted(buckets, key=lambda b: (b.window, b.longest, b.tokens, b.rows))


def find_bucket(size: StepSize, ordered: Iterable[StepSize]) -> StepSize | None:
    """Return the first bucket that has room for a step of this size, None if none has."""
    return next((bucket for bucket in ordered if all(map(le, size, bucket))), None)


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4, .. and `most`."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})


def _steps(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, .. and `most`: padding adds at most a half."""
    between = {3 << i for i in range(most.bit_length()) if 3 << i < most}
    return sorted({*_doubling(most), *between})


_GREEDY = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1)
_DRAWN = sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1, temperature=1)
EVERYTHING = sampling_pb2.SamplingParams(  # that truncates or shapes what is drawn
    temperature=1,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=[0],
    min_tokens=1,
    bad_words=[sampling_pb2.TokenSequence(token_ids=[0, 1])],
)


def warm_up_steps(
    slots: Slots, max_tokens: int, max_drafts: int, *, has_head: bool
) -> Iterator[tuple[Rows, sampling_pb2.SamplingParams]]:
    """Yield rows and their sampling parameters: windows of all parameters, prompts of all sizes.

    The largest steps have as many rows as there are slots, and max_tokens tokens. A model without
    an output head gets prompts alone, which are pooled.
    """
    null_slot, longest = slots.num_slots, min(max_tokens, slots.tokens.shape[1])
    for params in (_GREEDY, _DRAWN, EVERYTHING) if has_head else ():
        for num_drafts in range(max_drafts + 1):
            yield _rows(null_slot, 1, pb.VERIFY, max_drafts=num_drafts), params
    if has_head:
        yield _rows(null_slot, slots.num_slots, pb.VERIFY, max_drafts=max_drafts), _GREEDY
    last = pb.PREFILL_LAST if has_head else pb.POOL
    for power in range(longest.bit_length()):
        yield _rows(null_slot, 1, last, num_tokens=1 << power), _GREEDY
    prompts = min(slots.num_slots, -(-max_tokens // longest))
    yield _rows(null_slot, prompts, last, num_tokens=longest), _GREEDY


def _rows(
    slot: int, count: int, mode: pb.DecodeMode, *, max_drafts: int = 0, num_tokens: int = 0
) -> Rows:
    """Return rows whose drafter catches up with as many positions as they have tokens."""
    columns = {"slot": slot, "mode": mode, "num_tokens": num_tokens, "max_drafts": max_drafts}
    columns["max_proposed"] = max_drafts
    columns["catch_up"] = 1 + max_drafts if mode == pb.VERIFY else num_tokens
    names = (name for name, _ in Rows.none().columns())
    return Rows(**{name: np.full(count, columns.get(name, 0)) for name in names})


def add_admission(
    plan: pb.StepPlan,
    slot: int,
    ids: Sequence[int],
    blocks: Sequence[Sequence[int]],
    max_len: int,
    num_cached: int = 0,
) -> None:
    """Admit a greedy request to a slot, with its known token ids and its blocks by KV group."""
    plan.admissions.add(
        slot=slot,
        slot_epoch=1,
        token_ids=ids,
        prompt_len=len(ids),
        num_cached=num_cached,
        max_len=max_len,
        sampling=sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1),
        drafter_len=max(num_cached - 1, 0),
    )
    for group, table in enumerate(blocks):
        plan.extend_slots.append(slot)
        plan.extend_groups.append(group)
        plan.extend_counts.append(len(table))
        plan.block_ids.extend(table)


def add_row(
    plan: pb.StepPlan,
    slot: int,
    mode: pb.DecodeMode,
    length: int,
    *,
    num_tokens: int = 0,
    lag: int = 0,
    max_drafts: int = 0,
    last_step: int = 0,
) -> None:
    """Add a row of a slot that holds `length` committed tokens; its drafter lags by `lag`."""
    plan.slot.append(slot)
    plan.slot_epoch.append(1)
    plan.mode.append(mode)
    plan.num_tokens.append(num_tokens)
    plan.len_lo.append(length)
    plan.len_hi.append(length)
    plan.max_drafts.append(max_drafts)
    plan.max_proposed.append(max_drafts)
    plan.max_looked_up.append(0)
    plan.accepted_step.append(0)
    plan.accepted.append(0)
    plan.depends_on_step.append(last_step)
    plan.catch_up.append(lag)


def step_size(columns: StepColumns[HostColumn], geometry: Geometry) -> StepSize | None:
    """Return the room that a step takes in a bucket, None if there are no buckets for its kind."""
    if not len(geometry.width) or len(geometry.prompt.row) or len(geometry.pooled.token):
        return None
    tokens, longest = int(geometry.width.sum()), int(geometry.width.max())
    if columns.head is not None:
        tokens = max(tokens, len(columns.head.token_row))
        longest = max(longest, int(np.diff(columns.head.cu_rows).max()))
    return StepSize(
        rows=len(geometry.width),
        window=1 + int(geometry.max_drafts.max()),
        tokens=tokens,
        longest=longest,
        positions=len(columns.position_window),
        stops=len(columns.stops.ids),
    )


def padding(bucket: StepSize, null_slot: int, *, has_draft_head: bool) -> StepColumns[HostColumn]:
    """Return the columns of an empty bucket.

    Its rows have the NULL slot and no tokens. Its tokens and positions name the last row or window
    without belonging to it: they lie behind its end.
    """
    rows, tokens, positions = bucket.rows, bucket.tokens, bucket.positions
    return StepColumns(
        rows=StepRows(
            slot=_words(rows, null_slot),
            cu_rows=_words(rows + 1),
            advances=_words(rows),
            snapshot_len=_words(rows),
            snapshot_line=_words(rows),
            chunked=_words(rows),
            catch_up=_words(rows),
            window=_words(rows, -1),
            token_row=_words(tokens, rows - 1),
            position_row=_words(positions, rows - 1),
            position_offset=_words(positions, _OUTSIDE),
            cu_windows=_words(rows + 1),
        ),
        max_drafts=_words(rows),
        hidden_index=_words(positions),
        head=_no_drafts(bucket) if has_draft_head else None,
        position_window=_words(positions, rows - 1),
        draw=_no_draw(rows),
        stops=StopIds(_words(rows + 1), _words(bucket.stops)),
    )


def _no_drafts(bucket: StepSize) -> HeadInputs[HostColumn]:
    rows = bucket.rows
    return HeadInputs(
        token_row=_words(bucket.tokens, rows - 1),
        cu_rows=_words(rows + 1),
        draw=_no_draw(rows),
        factors=_floats(rows, 1),
    )


def _no_draw(windows: int) -> DrawParams[HostColumn]:
    """Return parameters of greedy requests that allow all tokens."""
    return DrawParams(
        temperature=_floats(windows, 0),
        seed_low=_words(windows),
        seed_high=_words(windows),
        max_gap=_floats(windows, math.inf),
        top_k=_words(windows, np.iinfo(np.int32).max),
        top_p=_floats(windows, math.inf),
    )


def _words(count: int, value: int = 0) -> Int32Array:
    return np.full(count, value, dtype=np.int32)


def _floats(count: int, value: float) -> FloatArray:
    return np.full(count, value, dtype=np.float32)
