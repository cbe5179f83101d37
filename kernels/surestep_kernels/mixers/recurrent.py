"""What recurrent ops are given besides their inputs: the rows of a batch, and the state they own.

Each slot holds one committed *state* and up to W *records* of its last window. A row first folds
the `pending` records of accepted tokens into the state and then runs its own tokens: those of a
prompt advance the state at once, those of a window are recorded. So the state only ever advances by
committed tokens, and decode, verification and prefill are one computation.

Where a device computes prompts in chunks, for speed, a chunk rounds otherwise than its tokens one
by one. So it is told which tokens those are: as many as fill whole chunks of a prompt, counted from
the first token of the sequence. Then no result depends on how a prompt was cut into rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrentRows(NamedTuple):
    """R rows. Row r owns tokens cu_rows[r]:cu_rows[r+1] and the slot slots[r]; no slot twice.

    A row without tokens is one of padding, whose state means nothing. Tokens from cu_rows[R] on
    belong to no row and have any result.
    """

    slots: Tensor  # i64[R]
    cu_rows: Tensor  # i32[R+1]
    start: Tensor  # i32[R] committed tokens; a row that starts at 0 starts from the zero state
    pending: Tensor  # i32[R] records to fold: accepted tokens of the slot's last window
    window: Tensor  # i32[R] 1: record the tokens; 0: they advance the state
    # Copy the state when it has advanced over so many tokens, folded ones first; 0 = never.
    snapshot_after: Tensor  # i32[R]
    snapshot_line: Tensor  # i32[R] to this line of the snapshots
    # So many leading tokens are whole chunks; nothing is pending then, and a snapshot of them is at
    # the end of one. 0 in windows, and wherever a device goes token by token.
    chunked: Tensor  # i32[R]
    max_tokens: int  # most tokens of a row, or more: known on the host, it sizes launches


class DeltaState(NamedTuple):
    """State of one gated delta layer over all slots, f32."""

    state: Tensor  # [S, Hv, dk, dv]
    snapshots: Tensor  # [M, Hv, dk, dv]
    keys: Tensor  # [S, W, Hk, dk] records: normalised keys
    deltas: Tensor  # [S, W, Hv, dv] what each key adds
    decays: Tensor  # [S, W, Hv] what it multiplies the state by


class ConvState(NamedTuple):
    """Inputs of one causal convolution over all slots: the last ones committed, then a window's."""

    inputs: Tensor  # [S, taps - 1 + W, C]
    snapshots: Tensor  # [M, taps - 1, C]
