"""The shape of a step: its slots, and how many tokens each has room for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from surestep_common.invariants import Int32Array
from surestep_kernels.slot_state import StepRows

from surestep_worker.ledger.plan import BoolArray, IntArray, Rows, SnapshotRequests
from surestep_worker.ledger.positions import (
    PooledTokens,
    PromptPositions,
    offsets,
    pooled_tokens,
    prompt_positions,
    sampled_positions,
    tokens_consumed,
)
from surestep_worker.ledger.slots import Slots

_NO_PROMPT = PromptPositions(*np.zeros((4, 0), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the host knows of a step before it runs.

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
    pooled: PooledTokens  # Q of them

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
        sampled = sampled_positions(rows, cu, rows.max_drafts)
        window = np.full(len(rows), -1)
        window[sampled.row] = np.arange(len(sampled.row))
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
            position_row=_words(sampled.row[sampled.window]),
            position_offset=_words(sampled.offset),
            cu_windows=_words(sampled.cu),
        )
        return cls(
            rows=columns,
            width=width,
            max_drafts=_words(rows.max_drafts),
            window_row=sampled.row,
            window_slot=rows.slot[sampled.row],
            position_window=_words(sampled.window),
            hidden_index=_words(np.concatenate((sampled.token, prompt.predictor, pooled.token))),
            prompt=prompt,
            pooled=pooled,
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
