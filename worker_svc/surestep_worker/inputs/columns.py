"""What the host sends with a step, and what stands in the places that a step leaves empty."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from surestep_kernels.step.choose import DrawParams
from surestep_kernels.step.commit_step import StopIds
from surestep_kernels.step.shape_logits import Biases, Forbidden, Penalties, Shaping
from surestep_kernels.step.slot_state import StepRows
from surestep_kernels.step.write_runs import Runs
from torch import Tensor

from surestep_worker.drafters.inputs import HeadInputs
from surestep_worker.ledger.positions import PooledTokens

from .buckets import Bucket, Need
from .geometry import Geometry
from .logprob_plan import ScoredPositions

_OUTSIDE = 1 << 29  # an offset that no window reaches, whose sums with lengths are still words


class PassInputs(NamedTuple):
    """What the host sends for R rows, N sampled, P positions of prompts, Q pooled ones."""

    rows: StepRows
    max_drafts: Tensor  # i32[R]
    hidden_index: Tensor  # i32[N + P + Q] into the step's tokens
    head: HeadInputs | None  # where a draft head drafts


class StepColumns(NamedTuple):
    """What every step sends; a captured one finds it at fixed addresses, padding behind it."""

    inputs: PassInputs
    position_window: Tensor  # i32[N]
    draw: DrawParams  # [V]
    stops: StopIds  # [V]


class PooledColumns(NamedTuple):
    """See PooledTokens."""

    slot: Tensor  # i32[Q]
    row_slot: Tensor  # i32[K]
    num_tokens: Tensor  # i32[K]

    @classmethod
    def of(cls, pooled: PooledTokens) -> PooledColumns | None:
        """Arrays; None when nothing is pooled."""
        if not len(pooled.token):
            return None
        columns: Any = pooled.slot, pooled.row_slot, pooled.num_tokens
        return cls._make(column.astype(np.int32) for column in columns)


class Extras(NamedTuple):
    """What some steps send besides."""

    differences: Runs | None = None  # of the slots, to be applied first
    biases: Biases | None = None
    penalties: Penalties | None = None
    forbidden: Forbidden | None = None
    scored: ScoredPositions | None = None
    pooled: PooledColumns | None = None

    @property
    def shaping(self) -> Shaping:
        """What changes logits."""
        return Shaping(self.biases, self.penalties, self.forbidden)

    @property
    def plain(self) -> bool:
        """Whether a step needs no more than to choose from the logits as they are."""
        return self[1:] == Extras()[1:]


def need_of(columns: StepColumns, geometry: Geometry) -> Need | None:
    """What room a step takes in a bucket, of arrays; None for one that no bucket is made for."""
    inputs = columns.inputs
    if not len(geometry.width) or len(geometry.prompt.row) or len(geometry.pooled.token):
        return None
    tokens, longest = int(geometry.width.sum()), int(geometry.width.max())
    if inputs.head is not None:
        tokens = max(tokens, len(inputs.head.token_row))
        longest = max(longest, int(np.asarray(inputs.rows.catch_up).max()))
    return Need(
        rows=len(geometry.width),
        window=1 + int(geometry.max_drafts.max()),
        tokens=tokens,
        longest=longest,
        positions=len(columns.position_window),
        stops=len(columns.stops.ids),
    )


def padding(bucket: Bucket, null_slot: int, *, has_draft_head: bool) -> StepColumns:
    """A bucket with nothing in it: arrays.

    Its rows have the NULL slot and no token, its tokens and positions belong to no row or window;
    they name the last one, behind whose own they stand.
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


def _no_drafts(bucket: Bucket) -> HeadInputs:
    rows = bucket.rows
    return HeadInputs(
        token_row=_words(bucket.tokens, rows - 1),
        cu_rows=_words(rows + 1),
        draw=_no_draw(rows),
        factors=_floats(rows, 1),
    )


def _no_draw(windows: int) -> DrawParams:
    """Greedy, from all tokens."""
    return DrawParams(
        temperature=_floats(windows, 0),
        seed_low=_words(windows),
        seed_high=_words(windows),
        max_gap=_floats(windows, math.inf),
        top_k=_words(windows, np.iinfo(np.int32).max),
        top_p=_floats(windows, math.inf),
    )


def _words(count: int, value: int = 0) -> Any:
    return np.full(count, value, dtype=np.int32)


def _floats(count: int, value: float) -> Any:
    return np.full(count, value, dtype=np.float32)
