"""What the host sends with a step, and the padding of what a step does not fill."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

import numpy as np
from surestep_common.invariants import FloatArray, Int32Array
from surestep_kernels.choose import DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.shape_logits import Biases, Forbidden, Masks, Penalties, Shaping
from surestep_kernels.slot_state import StepRows
from surestep_kernels.step_columns import Column, HostColumn
from surestep_kernels.write_runs import Runs

from surestep_worker.drafters.inputs import HeadInputs
from surestep_worker.ledger.positions import PooledTokens

from .buckets import Bucket, StepSize
from .geometry import Geometry
from .logprob_plan import ScoredPositions

_OUTSIDE = 1 << 29  # longer than any window; added to a length it still fits 32 bits


class PassInputs(NamedTuple, Generic[Column]):
    """Inputs of a forward pass of R rows.

    N positions are sampled, P positions of prompts are scored, Q are pooled.
    """

    rows: StepRows[Column]
    max_drafts: Column  # i32[R] that the drafter may propose
    hidden_index: Column  # i32[N + P + Q] into the step's tokens
    head: HeadInputs[Column] | None  # of a draft head that drafts within the pass


class StepColumns(NamedTuple, Generic[Column]):
    """What every step sends; a captured step reads it at fixed addresses, followed by padding."""

    inputs: PassInputs[Column]
    position_window: Column  # i32[N]
    draw: DrawParams[Column]  # [V]
    stops: StopIds[Column]  # [V]


class PooledColumns(NamedTuple, Generic[Column]):
    """The columns of PooledTokens that the device reads."""

    slot: Column  # i32[Q]
    row_slot: Column  # i32[K]
    num_tokens: Column  # i32[K]
    last: Column  # i32[K]
    label_ids: Column  # i32[K, L]

    @classmethod
    def of(cls, pooled: PooledTokens) -> PooledColumns[Int32Array] | None:
        """Return None when nothing is pooled."""
        if not len(pooled.token):
            return None
        columns = (
            *(pooled.slot, pooled.row_slot, pooled.num_tokens),
            *(pooled.last, pooled.label_ids),
        )
        return PooledColumns(*(column.astype(np.int32) for column in columns))


class Extras(NamedTuple, Generic[Column]):
    """What only some steps send."""

    differences: Runs[Column] | None = None  # of the slots, to be applied first
    biases: Biases[Column] | None = None
    penalties: Penalties[Column] | None = None
    forbidden: Forbidden[Column] | None = None
    scored: ScoredPositions[Column] | None = None
    pooled: PooledColumns[Column] | None = None
    masks: Masks[Column] | None = None

    @property
    def shaping(self) -> Shaping[Column]:
        return Shaping(self.biases, self.penalties, self.forbidden, self.masks)

    @property
    def plain(self) -> bool:
        """Whether a step only chooses from the logits as they are."""
        return self[1:] == Extras()[1:]


class LaunchInputs(NamedTuple, Generic[Column]):
    """What a step that is launched kernel by kernel sends at once."""

    columns: StepColumns[Column]
    extras: Extras[Column]


def step_size(columns: StepColumns[HostColumn], geometry: Geometry) -> StepSize | None:
    """Return the room that a step takes in a bucket, None if there are no buckets for its kind."""
    inputs = columns.inputs
    if not len(geometry.width) or len(geometry.prompt.row) or len(geometry.pooled.token):
        return None
    tokens, longest = int(geometry.width.sum()), int(geometry.width.max())
    if inputs.head is not None:
        tokens = max(tokens, len(inputs.head.token_row))
        longest = max(longest, int(inputs.rows.catch_up.max()))
    return StepSize(
        rows=len(geometry.width),
        window=1 + int(geometry.max_drafts.max()),
        tokens=tokens,
        longest=longest,
        positions=len(columns.position_window),
        stops=len(columns.stops.ids),
    )


def padding(bucket: Bucket, null_slot: int, *, has_draft_head: bool) -> StepColumns[HostColumn]:
    """Return the columns of an empty bucket.

    Its rows have the NULL slot and no tokens. Its tokens and positions name the last row or window
    without belonging to it: they lie behind its end.
    """
    rows, tokens, positions = bucket.rows, bucket.tokens, bucket.positions
    inputs = PassInputs(
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
    )
    stops = StopIds(_words(rows + 1), _words(bucket.stops))
    return StepColumns(inputs, _words(positions, rows - 1), _no_draw(rows), stops)


def _no_drafts(bucket: Bucket) -> HeadInputs[HostColumn]:
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
