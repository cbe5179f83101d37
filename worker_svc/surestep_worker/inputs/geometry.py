"""The shape of a step: which slots, and for how many tokens each there is room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from surestep_kernels.step.slot_state import StepRows

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
    """What the host knows of a step of R rows before it runs.

    T tokens, N sampled positions in V windows.
    """

    rows: StepRows  # of arrays
    width: IntArray  # [R] room for so many tokens
    max_drafts: Any  # i32[R]
    window_row: IntArray  # [V] row of each window
    window_slot: IntArray  # [V]
    position_window: Any  # i32[N]
    hidden_index: Any  # i32[N + P + Q] tokens whose hidden states are wanted
    prompt: PromptPositions  # P of them
    pooled: PooledTokens  # Q of them

    @classmethod
    def of(
        cls,
        rows: Rows,
        slots: Slots,
        wants_prompt: BoolArray,
        requested: SnapshotRequests,
    ) -> Geometry:
        """A window has room for the newest token and as many drafts as its row may have."""
        width = tokens_consumed(rows, rows.max_drafts)
        cu = offsets(width)
        token_row = np.repeat(np.arange(len(rows)), width)
        sampled = sampled_positions(rows, cu, rows.max_drafts)
        window = np.full(len(rows), -1)
        window[sampled.row] = np.arange(len(sampled.row))
        length, line = np.zeros((2, slots.num_slots + 1), dtype=np.int64)
        length[requested.slot], line[requested.slot] = requested.length, requested.id - 1
        prompt = _prompt(rows, cu, token_row, slots, wants_prompt)
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
    rows: Rows, cu: IntArray, token_row: IntArray, slots: Slots, wants_prompt: BoolArray
) -> PromptPositions:
    if not wants_prompt.any() or not rows.is_prefill.any():
        return _NO_PROMPT
    # Prompts are consumed as planned: a row with known tokens starts at len_hi.
    position = rows.len_hi[token_row] + np.arange(cu[-1]) - cu[token_row]
    return prompt_positions(rows, token_row, position, slots, wants_prompt)


def _words(column: IntArray | BoolArray) -> Any:
    """As it travels, and as the tensor that it will be."""
    return column.astype(np.int32)
