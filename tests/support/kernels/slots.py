"""Random slots, and the rows of a step that reads and advances them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from torch import Tensor

SLOTS, WIDTH, PAGES, BLOCK_SIZE, BLOCKS, VOCAB, K = 6, 90, 12, 8, 60, 1100, 3


def copied(tensors: Any) -> Any:
    """The same named tuple of copies."""
    return type(tensors)(*(tensor.clone() for tensor in tensors))


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randint(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def make_state() -> SlotState:
    """Slots of 20 to 40 committed tokens, one more known; the NULL slot is empty."""
    committed = randint(20, 40, SLOTS + 1)
    committed[-1] = 0
    some = [torch.randperm(BLOCKS - 1)[: SLOTS * 9].view(SLOTS, 9) for _ in range(2)]
    blocks = torch.stack(some).int() + 1
    tables = torch.full((2, SLOTS + 1, PAGES), NULL_BLOCK, dtype=torch.int32)
    tables[:, :SLOTS, :9] = blocks
    return SlotState(
        tokens=randint(0, VOCAB, SLOTS + 1, WIDTH),
        block_tables=tables,
        committed=committed,
        known=committed + 1,
        folded=committed - randint(0, 4, SLOTS + 1).minimum(committed),
        drafter_len=(committed - 5).clamp(min=0),
    )


class Step(NamedTuple):
    rows: StepRows
    drafts: DraftIds


def make_step() -> Step:
    """A prompt's part, its last part, a decode row, two windows, and one of padding."""
    width = [7, 5, 1, 1 + K, 1 + K, 1 + K]
    cu = [0, *torch.tensor(width).cumsum(0).tolist()]
    windows = [1, 1, 1 + K, 1 + K, 1 + K]  # of rows 1 to 5
    cu_windows = [0, *torch.tensor(windows).cumsum(0).tolist()]
    rows = StepRows(
        slot=i32(4, 0, 2, 1, 5, SLOTS),
        cu_rows=i32(*cu),
        advances=i32(1, 1, 0, 0, 0, 0),
        snapshot_len=i32(0, 1 << 20, 0, 0, 0, 0),
        snapshot_line=i32(0, 1, 0, 0, 0, 0),
        chunked=i32(0, 0, 0, 0, 0, 0),
        catch_up=i32(0, 3, 9, 0, 5, 0),
        window=i32(-1, 0, 1, 2, 3, 4),
        token_row=torch.arange(6, dtype=torch.int32).repeat_interleave(torch.tensor(width)),
        position_row=i32(1, 2, *[3] * (1 + K), *[4] * (1 + K), *[5] * (1 + K)),
        position_offset=i32(0, 0, *range(1 + K), *range(1 + K), *range(1 + K)),
        cu_windows=i32(*cu_windows),
    )
    return Step(rows, DraftIds(randint(0, VOCAB, 6, K), i32(0, 0, 0, K, 1, 0)))


def bounds(counts: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1), counts.cumsum(0))).int()


def random_state(num_rows: int) -> SlotState:
    """Slots of any length, with tables that name blocks 0 to 49."""
    lines = num_rows + 3
    committed, upto = randint(0, 60, lines), randint(0, 60, lines)
    committed[-1] = upto[-1] = 0  # the NULL slot holds nothing
    return SlotState(
        tokens=randint(0, 13, lines, WIDTH),
        block_tables=randint(0, 50, 3, lines, PAGES),
        committed=committed,
        known=committed + 1,
        folded=committed - randint(0, 4, lines).minimum(committed),
        drafter_len=upto,
    )


def random_rows(num_rows: int) -> tuple[StepRows, Tensor]:
    """Rows of prompts, of windows, or of padding, and how many drafts each has."""
    lines, advances = num_rows + 3, randint(0, 2, num_rows)
    width = torch.where(advances > 0, randint(1, 7, num_rows), 1 + K)
    slot = torch.randperm(lines - 1)[:num_rows].int()
    slot[::5] = lines - 1
    sampled = (advances == 0) | (randint(0, 2, num_rows) > 0)
    window = torch.where(sampled, sampled.cumsum(0) - 1, -1).int()
    positions = torch.where(advances > 0, 1, 1 + K)[sampled]
    row = torch.arange(num_rows, dtype=torch.int32)
    position_row = row[sampled].repeat_interleave(positions)
    cu_windows = bounds(positions)
    offset = torch.arange(len(position_row)) - cu_windows[:-1].long().repeat_interleave(positions)
    rows = StepRows(
        slot=slot,
        cu_rows=bounds(width),
        advances=advances,
        snapshot_len=randint(0, 60, num_rows),
        snapshot_line=randint(0, 3, num_rows),
        chunked=torch.zeros(num_rows, dtype=torch.int32),
        catch_up=randint(0, 9, num_rows),
        window=window,
        token_row=row.repeat_interleave(width),
        position_row=position_row,
        position_offset=offset.int(),
        cu_windows=cu_windows,
    )
    return rows, torch.where((advances > 0) | (slot == lines - 1), 0, randint(0, K + 1, num_rows))
