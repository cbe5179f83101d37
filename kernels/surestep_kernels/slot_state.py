"""The state that a device keeps of every slot, and the rows of a step that reads and advances it.

A step on a device cannot ask the host how long its slots are: the step before it may still be
running. The host fixes the *geometry* (which slots, at most how many tokens each); lengths, drafts
and accepted counts stay on the device, in the slots. A row of padding has the NULL slot, the last
line of every tensor, whose block table holds only the NULL block.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from torch import Tensor

from .step_columns import Column

OUT_OF_BOUNDS = 1  # bit of the error word: a slot, block or position that does not exist


class SlotState(NamedTuple):
    """All tensors are i32 with one line per slot; each of G KV groups has a block table of it."""

    tokens: Tensor  # [S, W] committed tokens, the newest one, this step's drafts
    block_tables: Tensor  # [G, S, B] of every KV group
    committed: Tensor  # [S] tokens whose KV is valid
    known: Tensor  # [S] tokens whose id is known
    folded: Tensor  # [S] tokens that the recurrent state holds
    drafter_len: Tensor  # [S] positions that the drafter's state holds


class StepRows(NamedTuple, Generic[Column]):
    """R rows of up to T tokens, N of which are sampled, in V windows; filled by the host."""

    slot: Column  # i32[R]
    cu_rows: Column  # i32[R+1] row r has room for tokens cu_rows[r]:cu_rows[r+1]
    advances: Column  # i32[R] 1: known tokens, committed at once; 0: a window of newest and drafts
    snapshot_len: Column  # i32[R] copy the recurrent state after so many tokens; 0 = never
    snapshot_line: Column  # i32[R] to this line
    chunked: Column  # i32[R] see RecurrentRows
    catch_up: Column  # i32[R] positions that the drafter's state follows by, at most
    window: Column  # i32[R] index of the row's window, -1 without one
    token_row: Column  # i32[T] row of each token
    position_row: Column  # i32[N] row of each sampled position
    position_offset: Column  # i32[N] its index within the window
    cu_windows: Column  # i32[V+1] window w owns sampled positions cu_windows[w]:cu_windows[w+1]


class DraftIds(NamedTuple):
    """Proposals of the drafter, on the device. Columns from `counts` on are unused."""

    ids: Tensor  # i32[R, K]
    counts: Tensor  # i32[R]
