"""The rows and the state that recurrent ops take besides their inputs.

Each slot holds one committed *state* and up to W *records* of its last window. A row first folds
the `pending` records of accepted tokens into the state and then runs its own tokens: those of a
prompt advance the state at once, those of a window are recorded. So the state only ever advances by
committed tokens, and decode, verification and prefill are one computation.

Where a device computes prompts in chunks, for speed, a chunk rounds differently from its tokens one
by one. So the rows say which tokens are computed in chunks: as many as fill whole chunks of a
prompt, counted from the first token of the sequence. Then no result depends on how a prompt was cut
into rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrentRows(NamedTuple):
    """R rows. Row r owns tokens cu_rows[r]:cu_rows[r+1] and the slot slots[r]; all slots are
    distinct.

    A row without tokens is padding, and its state is undefined. Tokens from cu_rows[R] on belong to
    no row, and their result is undefined.
    """

    slots: Tensor  # i64[R]
    cu_rows: Tensor  # i32[R+1]
    start: Tensor  # i32[R] committed tokens; a row that starts at 0 starts from the zero state
    pending: Tensor  # i32[R] records to fold: accepted tokens of the slot's last window
    window: Tensor  # i32[R] 1: record the tokens; 0: they advance the state
    # Copy the state after this many tokens, folded ones included; 0 = never.
    snapshot_after: Tensor  # i32[R]
    snapshot_line: Tensor  # i32[R] to this line of the snapshots
    # Number of leading tokens that form whole chunks; then nothing is pending, and a snapshot is at
    # the end of a chunk. 0 in windows, and on devices that go token by token.
    chunked: Tensor  # i32[R]
    max_tokens: int  # upper bound of the tokens of a row, known on the host; it sizes launches


class DeltaState(NamedTuple):
    """State of one gated delta layer over all slots, f32."""

    state: Tensor  # [S, Hv, dk, dv]
    snapshots: Tensor  # [M, Hv, dk, dv]
    keys: Tensor  # [S, W, Hk, dk] records: normalised keys
    deltas: Tensor  # [S, W, Hv, dv] what each key adds
    decays: Tensor  # [S, W, Hv] what it multiplies the state by


class ConvState(NamedTuple):
    """Inputs of one causal convolution over all slots: the last committed ones, then a window's."""

    inputs: Tensor  # [S, taps - 1 + W, C]
    snapshots: Tensor  # [M, taps - 1, C]
