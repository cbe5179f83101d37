"""The shape of a step: which slots, and for how many tokens each there is room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from surestep_kernels.slot_state import StepRows
from surestep_proto import engine_pb2 as pb

from surestep_worker.gather import PromptPositions, offsets
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
        width = np.where(rows.is_prefill, rows.num_tokens, 1 + rows.k_cap)
        cu = offsets(width)
        window_row = np.flatnonzero(rows.is_sampled)
        window_width = np.where(rows.is_prefill, 1, width)[window_row]
        cu_windows = offsets(window_width)
        position_window = np.repeat(np.arange(len(window_row)), window_width)
        offset = np.arange(cu_windows[-1]) - cu_windows[position_window]
        last = rows.mode[window_row] == pb.PREFILL_LAST
        first = np.where(last, cu[window_row + 1] - 1, cu[window_row])
        window = np.full(len(rows), -1)
        window[window_row] = np.arange(len(window_row))
        length, line = np.zeros((2, slots.num_slots), dtype=np.int64)
        length[armed.slot], line[armed.slot] = armed.length, armed.id - 1
        prompt = _prompt_positions(rows, cu, slots, wants_prompt)
        columns = StepRows(
            slot=_words(rows.slot),
            cu_rows=_words(cu),
            advances=_words(rows.is_prefill),
            snapshot_len=_words(length[rows.slot]),
            snapshot_line=_words(line[rows.slot]),
            catch_up=_words(rows.catch_up),
            window=_words(window),
            token_row=_words(np.repeat(np.arange(len(rows)), width)),
            position_row=_words(window_row[position_window]),
            position_offset=_words(offset),
            cu_windows=_words(cu_windows),
        )
        index = np.concatenate((first[position_window] + offset, prompt.predictor))
        return cls(columns, width, window_row, _words(position_window), _words(index), prompt)


def _words(column: IntArray | BoolArray) -> Any:
    """As it travels, and as the tensor that it will be."""
    return column.astype(np.int32)


def _prompt_positions(
    rows: Rows, cu: IntArray, slots: Slots, wants_prompt: BoolArray
) -> PromptPositions:
    """Where log-probabilities of the prompt are wanted. Prompts are consumed as planned: a row
    with known tokens starts at len_hi."""
    wanted = np.flatnonzero(rows.is_prefill & wants_prompt[rows.slot])
    count = (cu[1:] - cu[:-1])[wanted]
    row = np.repeat(wanted, count)
    offset = np.arange(len(row)) - offsets(count)[np.repeat(np.arange(len(wanted)), count)]
    position = rows.len_hi[row] + offset
    inside = position + 1 < slots.prompt_len[rows.slot[row]]
    row, offset, position = row[inside], offset[inside], position[inside]
    slot = rows.slot[row]
    ids = slots.ids_at(slot, position + 1)
    return PromptPositions(row=row, slot=slot, token_id=ids, predictor=cu[row] + offset)
