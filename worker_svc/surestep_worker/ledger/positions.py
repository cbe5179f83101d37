"""Which tokens of a step are sampled, scored or pooled, as far as the plan alone decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from .plan import BoolArray, IntArray, Rows
from .slots import Slots


class Sampled(NamedTuple):
    """The sampled tokens of a batch: W windows with N positions."""

    row: IntArray  # [W] index into the plan's rows
    cu: IntArray  # [W+1] window w owns sampled positions cu[w]:cu[w+1]
    window: IntArray  # [N] window of each position
    offset: IntArray  # [N] its index within the window
    token: IntArray  # [N] index into the batch's tokens


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Prompt tokens whose log-probabilities are reported, each predicted by the token before it."""

    row: IntArray  # [P] index into the plan's rows, ascending
    slot: IntArray  # [P]
    token_id: IntArray  # [P]
    predictor: IntArray  # [P] token before each, as an index into the batch's tokens


class PooledTokens(NamedTuple):
    """The tokens of a batch that are pooled into vectors, and the vectors that they complete."""

    slot: IntArray  # [Q] slot of each token
    token: IntArray  # [Q] its index into the batch's tokens
    row: IntArray  # [K] row of each complete vector, ascending
    row_slot: IntArray  # [K] slot of each vector
    num_tokens: IntArray  # [K] tokens that each vector is the mean of
    last: IntArray  # [K] the last of its tokens, as an index into the Q above
    num_labels: IntArray  # [K] tokens whose logits are the vector instead; 0 = it is a mean
    label_ids: IntArray  # [K, L] these tokens, followed by whatever


def sampled_positions(rows: Rows, cu: IntArray, n_drafts: IntArray) -> Sampled:
    """Return the last token of PREFILL_LAST rows and every token of DECODE and VERIFY rows."""
    row = np.flatnonzero(rows.is_sampled)
    width = np.where(rows.mode[row] == pb.PREFILL_LAST, 1, 1 + n_drafts[row])
    window_cu = offsets(width)
    window = np.repeat(np.arange(len(row)), width)
    offset = np.arange(window_cu[-1]) - window_cu[window]
    first = np.where(rows.mode[row] == pb.PREFILL_LAST, cu[row + 1] - 1, cu[row])
    return Sampled(row, window_cu, window, offset, first[window] + offset)


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


def pooled_tokens(rows: Rows, row: IntArray, cu: IntArray, slots: Slots) -> PooledTokens:
    """Return those of a batch whose tokens [T] belong to `row`; row r has tokens cu[r]:cu[r+1]."""
    pooling = slots.pooling[rows.slot]
    complete = rows.mode == pb.POOL
    pooled = (rows.is_prefill & (pooling == sampling_pb2.MEAN))[row]
    pooled[cu[1:][complete] - 1] = True  # the last token, whatever the pooling
    (token,), (last,) = pooled.nonzero(), complete.nonzero()
    whole = rows.len_hi[last] + rows.num_tokens[last]  # prompts are consumed as planned
    num_tokens = np.where(pooling[last] == sampling_pb2.MEAN, whole, 1)
    slot = rows.slot[last]
    num_labels = slots.num_labels[slot]
    return PooledTokens(
        slot=rows.slot[row[token]],
        token=token,
        row=last,
        row_slot=slot,
        num_tokens=num_tokens,
        last=np.searchsorted(token, cu[1:][last] - 1),
        num_labels=num_labels,
        label_ids=slots.label_ids[slot, : num_labels.max(initial=0)],
    )


def tokens_consumed(rows: Rows, n_drafts: IntArray) -> IntArray:
    """Return the number of input tokens of each row [R]."""
    consumed: IntArray = np.where(rows.is_prefill, rows.num_tokens, 1 + n_drafts)
    return consumed


def offsets(counts: IntArray) -> IntArray:
    """Return the first element of each of R groups, then the total: i64[R+1]."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
