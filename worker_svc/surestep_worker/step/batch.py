"""A step as arrays: its rows, positions and windows, and the columns that the device reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np
from surestep_common.invariants import BoolArray, Int32Array, IntArray
from surestep_kernels.choose import DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.shape_logits import Shaping
from surestep_kernels.slot_state import StepRows
from surestep_kernels.step_columns import Column, HostColumn
from surestep_kernels.write_runs import Runs
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.drafters.inputs import HeadInputs

from .plan import Rows, SnapshotRequests
from .sampling import SamplingTable
from .slots import Slots


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Prompt tokens whose log-probabilities are reported, each predicted by the token before it."""

    row: IntArray  # [P] index into the plan's rows, ascending
    slot: IntArray  # [P]
    token_id: IntArray  # [P]
    predictor: IntArray  # [P] token before each, as an index into the batch's tokens


class Pooled(NamedTuple, Generic[Column]):
    """The tokens of a step that are pooled into vectors, and the vectors that they complete."""

    slot: Column  # i32[Q] slot of each token
    token: Column  # i32[Q] its index into the batch's tokens
    row: Column  # i32[K] row of each complete vector, ascending
    row_slot: Column  # i32[K] slot of each vector
    num_tokens: Column  # i32[K] tokens that each vector is the mean of
    last: Column  # i32[K] the last of its tokens, as an index into the Q above
    num_labels: Column  # i32[K] tokens whose logits are the vector instead; 0 = it is a mean
    label_ids: Column  # i32[K, L] these tokens, followed by whatever


def sampled_positions(rows: Rows, cu: IntArray, n_drafts: IntArray) -> tuple[IntArray, ...]:
    """Find the last token of PREFILL_LAST rows and every token of DECODE and VERIFY rows.

    Returns, of V windows with N positions: the row of each window [V], the bounds of its positions
    [V+1], and of each position [N] its window, its index within the window, and its token in the
    batch.
    """
    row = np.flatnonzero(rows.is_sampled)
    width = np.where(rows.mode[row] == pb.PREFILL_LAST, 1, 1 + n_drafts[row])
    window_cu = offsets(width)
    window = np.repeat(np.arange(len(row)), width)
    offset = np.arange(window_cu[-1]) - window_cu[window]
    first = np.where(rows.mode[row] == pb.PREFILL_LAST, cu[row + 1] - 1, cu[row])
    return row, window_cu, window, offset, first[window] + offset


def prompt_positions(
    rows: Rows, row: IntArray, positions: IntArray, slots: Slots, prompt_logprobs: BoolArray
) -> PromptPositions:
    """Return those of a batch whose tokens [T] belong to `row` and have these `positions`."""
    token_slot = rows.slot[row]
    scored = (rows.is_prefill & prompt_logprobs[rows.slot])[row]
    predictor = np.flatnonzero(scored & (positions + 1 < slots.prompt_len[token_slot]))
    slot = token_slot[predictor]
    return PromptPositions(
        row=row[predictor],
        slot=slot,
        token_id=slots.ids_at(slot, positions[predictor] + 1),
        predictor=predictor,
    )


def pooled_tokens(rows: Rows, row: IntArray, cu: IntArray, slots: Slots) -> Pooled[Int32Array]:
    """Return those of a batch whose tokens [T] belong to `row`; row r has tokens cu[r]:cu[r+1]."""
    pooling = slots.pooling[rows.slot]
    complete = rows.mode == pb.POOL
    if not pooling.any() and not complete.any():
        return _NOTHING_POOLED
    pooled = (rows.is_prefill & (pooling == sampling_pb2.MEAN))[row]
    pooled[cu[1:][complete] - 1] = True  # the last token, whatever the pooling
    (token,), (last,) = pooled.nonzero(), complete.nonzero()
    whole = rows.len_hi[last] + rows.num_tokens[last]  # prompts are consumed as planned
    num_tokens = np.where(pooling[last] == sampling_pb2.MEAN, whole, 1)
    slot = rows.slot[last]
    num_labels = slots.num_labels[slot]
    return Pooled(
        slot=_words(rows.slot[row[token]]),
        token=_words(token),
        row=_words(last),
        row_slot=_words(slot),
        num_tokens=_words(num_tokens),
        last=_words(np.searchsorted(token, cu[1:][last] - 1)),
        num_labels=_words(num_labels),
        label_ids=_words(slots.label_ids[slot, : num_labels.max(initial=0)]),
    )


def tokens_consumed(rows: Rows, n_drafts: IntArray) -> IntArray:
    """Return the number of input tokens of each row [R]."""
    consumed: IntArray = np.where(rows.is_prefill, rows.num_tokens, 1 + n_drafts)
    return consumed


def offsets(counts: IntArray) -> IntArray:
    """Return the first element of each of R groups, then the total: i64[R+1]."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


_NO_PROMPT = PromptPositions(*np.zeros((4, 0), dtype=np.int64))
_NOTHING_POOLED: Pooled[Int32Array] = Pooled(*np.zeros((8, 0), dtype=np.int32))._replace(
    label_ids=np.zeros((0, 0), dtype=np.int32)
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of a step, known to the host before it runs.

    The step has R rows of T tokens, N sampled positions in V windows.
    """

    rows: StepRows[Int32Array]
    width: IntArray  # [R] tokens that each row has room for
    max_drafts: Int32Array  # [R]
    window_row: IntArray  # [V] row of each window
    window_slot: IntArray  # [V]
    position_window: Int32Array  # [N]
    hidden_index: Int32Array  # [N + P + Q] tokens whose final hidden states are read
    prompt: PromptPositions  # P of them
    pooled: Pooled[Int32Array]  # Q of them
    adapters: Int32Array | None  # [T] place of each token's adapter, -1 = none; None: none has one

    @classmethod
    def of(
        cls,
        rows: Rows,
        slots: Slots,
        prompt_logprobs: BoolArray,
        requested: SnapshotRequests,
    ) -> Geometry:
        """Give every window room for the newest token and the most drafts its row may have.

        `prompt_logprobs` bool[S] says which slots have log-probabilities of their prompt reported.
        """
        width = tokens_consumed(rows, rows.max_drafts)
        cu = offsets(width)
        token_row = np.repeat(np.arange(len(rows)), width)
        window_row, cu_windows, position_window, offset, sampled = sampled_positions(
            rows, cu, rows.max_drafts
        )
        window = np.full(len(rows), -1)
        window[window_row] = np.arange(len(window_row))
        length, line = np.zeros((2, slots.num_slots + 1), dtype=np.int64)
        length[requested.slot], line[requested.slot] = requested.length, requested.id - 1
        prompt = _prompt(rows, cu, token_row, slots, prompt_logprobs)
        pooled = pooled_tokens(rows, token_row, cu, slots)
        chunked = slots.chunked(rows.slot, rows.len_hi, rows.num_tokens)
        columns = StepRows(
            slot=_words(rows.slot),
            cu_rows=_words(cu),
            advances=_words(rows.is_prefill),
            snapshot_len=_words(length[rows.slot]),
            snapshot_line=_words(line[rows.slot]),
            chunked=_words(chunked),
            catch_up=_words(rows.catch_up),
            window=_words(window),
            token_row=_words(token_row),
            position_row=_words(window_row[position_window]),
            position_offset=_words(offset),
            cu_windows=_words(cu_windows),
        )
        return cls(
            rows=columns,
            width=width,
            max_drafts=_words(rows.max_drafts),
            window_row=window_row,
            window_slot=rows.slot[window_row],
            position_window=_words(position_window),
            hidden_index=np.concatenate((_words(sampled), _words(prompt.predictor), pooled.token)),
            prompt=prompt,
            pooled=pooled,
            adapters=_words(rows.adapter[token_row] - 1) if rows.adapter.any() else None,
        )


def _prompt(
    rows: Rows, cu: IntArray, token_row: IntArray, slots: Slots, prompt_logprobs: BoolArray
) -> PromptPositions:
    if not prompt_logprobs.any() or not rows.is_prefill.any():
        return _NO_PROMPT
    # Prompts are consumed as planned: a row with known tokens starts at len_hi.
    position = rows.len_hi[token_row] + np.arange(cu[-1]) - cu[token_row]
    return prompt_positions(rows, token_row, position, slots, prompt_logprobs)


def _words(column: IntArray | BoolArray) -> Int32Array:
    return column.astype(np.int32)


class StepColumns(NamedTuple, Generic[Column]):
    """Columns that every step sends; a captured step reads them at fixed addresses, with padding.

    R rows in V windows: N positions are sampled, P positions of prompts scored, Q pooled.
    """

    rows: StepRows[Column]
    max_drafts: Column  # i32[R] that the drafter may propose
    hidden_index: Column  # i32[N + P + Q] into the step's tokens
    head: HeadInputs[Column] | None  # of a draft head that drafts within the pass
    position_window: Column  # i32[N]
    draw: DrawParams[Column]  # [V]
    stops: StopIds[Column]  # [V]

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        sampling: SamplingTable,
        max_drafts: IntArray,
        head: HeadInputs[HostColumn] | None = None,
    ) -> StepColumns[HostColumn]:
        """Return the columns of a step whose drafter may propose max_drafts [R]."""
        windows = geometry.window_slot
        return StepColumns(
            rows=geometry.rows,
            max_drafts=_words(max_drafts),
            hidden_index=geometry.hidden_index,
            head=head,
            position_window=geometry.position_window,
            draw=sampling.draw(windows),
            stops=sampling.stops(windows),
        )


class Extras(NamedTuple, Generic[Column]):
    """Inputs that only some steps send."""

    differences: Runs[Column] | None = None  # of the slots, to be applied first
    shaping: Shaping[Column] = Shaping()
    scored: Column | None = None  # i32[M + P] positions whose tokens are scored: of windows, then P
    prompt_ids: Column | None = None  # i32[P] tokens that prompts have at the last of them
    pooled: Pooled[Column] | None = None
    adapters: Column | None = None  # i32[T] place of each token's adapter, -1 = none

    @property
    def plain(self) -> bool:
        """Return whether a step only chooses from the logits as they are."""
        others = self.scored, self.prompt_ids, self.pooled, self.adapters
        return self.shaping == Shaping() and all(one is None for one in others)


Inputs = tuple[StepColumns[Column], Extras[Column]]  # of a step
