"""The shape of a step: which slots, and for how many tokens each there is room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from surestep_kernels.slot_state import StepRows

from surestep_worker.gather import (
    PromptPositions,
    offsets,
    prompt_positions,
    sampled_windows,
    tokens_consumed,
)
from surestep_worker.plan import ArmedSnapshots, BoolArray, IntArray, Rows
from surestep_worker.slots import Slots


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the host knows of a step before it runs. R rows, T tokens, N sampled positions."""

    rows: StepRows  # of arrays
    width: IntArray  # [R] room for so many tokens
    window_row: IntArray  # [V] row of each window
    position_window: Any  # i32[N]
    logits_index: Any  # i32[N + P] tokens whose logits are wanted
    prompt: PromptPositions  # P of them

    @classmethod
    def of(
        cls, rows: Rows, slots: Slots, wants_prompt: BoolArray, armed: ArmedSnapshots
    ) -> Geometry:
        """A window has room for the newest token and as many drafts as its row may have."""
        width = tokens_consumed(rows, rows.k_cap)
        cu = offsets(width)
        token_row = np.repeat(np.arange(len(rows)), width)
        windows, sampled = sampled_windows(rows, cu, rows.k_cap, slots)
        window = np.full(len(rows), -1)
        window[windows.row] = np.arange(len(windows.row))
        position_window = np.repeat(np.arange(len(windows.row)), np.diff(windows.cu))
        # Prompts are consumed as planned: a row with known tokens starts at len_hi.
        position = rows.len_hi[token_row] + np.arange(cu[-1]) - cu[token_row]
        length, line = np.zeros((2, slots.num_slots), dtype=np.int64)
        length[armed.slot], line[armed.slot] = armed.length, armed.id - 1
        prompt = prompt_positions(rows, token_row, position, slots, wants_prompt)
        columns = StepRows(
            slot=_words(rows.slot),
            cu_rows=_words(cu),
            advances=_words(rows.is_prefill),
            snapshot_len=_words(length[rows.slot]),
            snapshot_line=_words(line[rows.slot]),
            catch_up=_words(rows.catch_up),
            window=_words(window),
            token_row=_words(token_row),
            position_row=_words(windows.row[position_window]),
            position_offset=_words(np.arange(len(position_window)) - windows.cu[position_window]),
            cu_windows=_words(windows.cu),
        )
        index = _words(np.concatenate((sampled, prompt.predictor)))
        return cls(columns, width, windows.row, _words(position_window), index, prompt)


def _words(column: IntArray | BoolArray) -> Any:
    """As it travels, and as the tensor that it will be."""
    return column.astype(np.int32)
