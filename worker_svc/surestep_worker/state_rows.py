"""What the rows of a step do to recurrent state: fold, record, copy to a snapshot."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .plan import ArmedSnapshots, IntArray, Rows
from .slots import Slots

Int32Array = npt.NDArray[np.int32]


class StateColumns(NamedTuple):
    """The columns of RecurrentRows, as numpy arrays."""

    slots: IntArray
    cu_rows: Int32Array
    start: Int32Array
    pending: Int32Array
    window: Int32Array
    snapshot_after: Int32Array
    snapshot_line: Int32Array
    chunked: Int32Array


class StateRows(NamedTuple):
    """What a step does to recurrent state."""

    columns: StateColumns
    folded: IntArray  # [R] tokens that each row's state holds afterwards
    snapshot_ids: IntArray  # [N] that are taken
    snapshot_lens: IntArray  # [N] after so many tokens


def state_rows(
    rows: Rows, consumed: IntArray, cu: IntArray, slots: Slots, armed: ArmedSnapshots
) -> StateRows:
    """Tokens of prompts advance the state, those of windows are recorded: see docs/protocol.md.

    `consumed` [R] tokens per row lie at cu [R+1]. A snapshot is taken when the state reaches its
    length on the way.
    """
    slot, start, held = rows.slot, slots.committed[rows.slot], slots.folded[rows.slot]
    folded = start + np.where(rows.is_prefill, consumed, 0)
    length, snapshot_id = np.zeros((2, slots.num_slots), dtype=np.int64)
    length[armed.slot], snapshot_id[armed.slot] = armed.length, armed.id
    taken = (held < length[slot]) & (length[slot] <= folded)
    columns = StateColumns(
        slot,
        *_int32(
            cu,
            start,
            start - held,
            ~rows.is_prefill,
            np.where(taken, length[slot] - held, 0),
            np.where(taken, snapshot_id[slot] - 1, 0),
            slots.chunked(slot, start, np.where(rows.is_prefill, consumed, 0)),
        ),
    )
    return StateRows(columns, folded, snapshot_id[slot][taken], length[slot][taken])


def _int32(*columns: npt.NDArray[Any]) -> list[Int32Array]:
    return [column.astype(np.int32) for column in columns]
