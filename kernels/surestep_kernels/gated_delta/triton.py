"""The gated delta rule in Triton, token by token (gated_delta_chunks.py has whole chunks of
prompts).

One program holds some columns of one head's state in registers: it folds the row's pending records,
then runs its tokens, those after whole chunks. A column depends on no other, and the state is
updated in the same way everywhere, so that a token is the same whether it was drafted, folded,
after the last whole chunk of a prompt, or computed again after it had been emitted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.columns.gpu.recurrent_rows import (
    COLUMNS,
    row_pending,
    row_slot,
    row_snapshot,
    row_tail,
)
from surestep_kernels.recurrent_rows import DeltaState, RecurrentRows

from .chunks import CHUNK, run_chunks
from .inputs import prepare

_BLOCK_V = 32  # columns of a program: 128 bytes of every line of the state


@triton.jit
def _fold(state, key, delta, decay):
    """Update the state: a product and an explicitly fused sum, so that all compilers round it
    alike."""
    keys, deltas = tl.broadcast(key[:, None], delta[None, :])
    return tl.fma(keys, deltas, state * decay)


@triton.jit
def _fold_records(
    state,  # [BLOCK_K, BLOCK_V]
    keys,  # f32[RECORDS, HK, DK], of the row and head as all that follow
    decays,  # f32[RECORDS, HV]
    deltas,  # f32[RECORDS, HV, DV]
    pending,
    copy_at,
    copy_to,  # [BLOCK_K, BLOCK_V]
    i,  # [BLOCK_K]
    j,  # [BLOCK_V]
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    for t in range(pending):
        key = tl.load(keys + t * HK * DK + i, mask=i < DK, other=0.0)
        delta = tl.load(deltas + t * HV * DV + j, mask=j < DV, other=0.0)
        state = _fold(state, key, delta, tl.load(decays + t * HV))
        if t + 1 == copy_at:
            tl.store(copy_to, state, mask=(i < DK)[:, None] & (j < DV)[None, :])
    return state


@triton.jit
def _run_tokens(
    state,
    out_ptr,
    qkv_ptr,
    q_ptr,
    k_ptr,
    betas_ptr,
    decays_ptr,
    deltas,
    first,
    count,
    window,
    copy_at,
    copy_to,
    head,
    i,
    j,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RECORDS: tl.constexpr,
):
    """Return the state after tokens first..first+count; store outputs and a window's deltas."""
    for t in range(count):
        at = first + t
        k_at, v_at = (at * HK + head // (HV // HK)) * DK + i, (at * HV + head) * DV + j
        query = tl.load(q_ptr + k_at, mask=i < DK, other=0.0)
        key = tl.load(k_ptr + k_at, mask=i < DK, other=0.0)
        value = tl.load(qkv_ptr + (at + 1) * 2 * HK * DK + v_at, mask=j < DV, other=0.0)
        decay, beta = tl.load(decays_ptr + at * HV + head), tl.load(betas_ptr + at * HV + head)
        predicted = tl.sum(state * decay * key[:, None], axis=0)
        delta = (value.to(tl.float32) - predicted) * beta
        state = _fold(state, key, delta, decay)
        out = tl.sum(state * query[:, None], axis=0)
        tl.store(out_ptr + v_at, out.to(out_ptr.dtype.element_ty), mask=j < DV)
        recorded = j < tl.where(window & (t < RECORDS), DV, 0)
        tl.store(deltas + t * HV * DV + j, delta, mask=recorded)
        if (not window) & (t + 1 == copy_at):
            tl.store(copy_to, state, mask=(i < DK)[:, None] & (j < DV)[None, :])
    return state


@DependentKernel
@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _gated_delta_kernel(
    out_ptr,  # [T, HV, DV]
    qkv_ptr,  # [T, 2 HK DK + HV DV]
    q_ptr,  # f32[T, HK, DK]
    k_ptr,  # f32[T, HK, DK]
    betas_ptr,  # f32[T, HV]
    new_decays_ptr,  # f32[T, HV]
    pending_keys_ptr,  # f32[R, RECORDS, HK, DK]
    pending_decays_ptr,  # f32[R, RECORDS, HV]
    state_ptr,  # f32[S, HV, DK, DV]
    snapshots_ptr,  # f32[M, HV, DK, DV]
    deltas_ptr,  # f32[S, RECORDS, HV, DV]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R + 1]
    start_ptr,  # i32[R]
    pending_ptr,  # i32[R]
    window_ptr,  # i32[R]
    snapshot_after_ptr,  # i32[R]
    snapshot_line_ptr,  # i32[R]
    chunked_ptr,  # i32[R]
    num_slots,
    num_lines,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RECORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot, known = row_slot(slots_ptr, row, num_slots)
    first, count, chunked = row_tail(cu_rows_ptr, chunked_ptr, row, CHUNK)  # the state is there
    if (not known) | (count <= 0):
        return
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask, tile = (i < DK)[:, None] & (j < DV)[None, :], i[:, None] * DV + j[None, :]
    copy_at, line = row_snapshot(snapshot_after_ptr, snapshot_line_ptr, row, num_lines)
    state_at = state_ptr + (slot * HV + head) * DK * DV + tile
    copy_to = snapshots_ptr + (line * HV + head) * DK * DV + tile
    deltas = deltas_ptr + (slot * RECORDS * HV + head) * DV
    pending, window = row_pending(pending_ptr, row, RECORDS), tl.load(window_ptr + row) != 0
    keys = pending_keys_ptr + (row * RECORDS * HK + head // (HV // HK)) * DK
    decays = pending_decays_ptr + row * RECORDS * HV + head
    begun = i < tl.where(tl.load(start_ptr + row) + chunked > 0, DK, 0)
    state = tl.load(state_at, mask=begun[:, None] & (j < DV)[None, :], other=0.0)
    state = _fold_records(
        state, keys, decays, deltas, pending, copy_at, copy_to, i, j, HK, HV, DK, DV
    )
    tl.debug_barrier()  # from here on threads may overwrite what other threads had to read
    if window:
        tl.store(state_at, state, mask=mask)
    state = _run_tokens(
        state,
        out_ptr,
        qkv_ptr,
        q_ptr,
        k_ptr,
        betas_ptr,
        new_decays_ptr,
        deltas,
        first,
        count,
        window,
        copy_at - pending - chunked,
        copy_to,
        head,
        i,
        j,
        HK,
        HV,
        DK,
        DV,
        RECORDS,
    )
    if not window:
        tl.store(state_at, state, mask=mask)


def gated_delta(
    qkv: Tensor,
    beta_and_decay: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    delta: DeltaState,
    rows: RecurrentRows,
) -> Tensor:
    """Run the rule as gated_delta_reference; beta_and_decay may be a slice of a projection."""
    num_slots, v_heads, k_dim, v_dim = delta.state.shape
    _, records, k_heads, _ = delta.keys.shape
    inputs = qkv, beta_and_decay, a_log, dt_bias
    assert beta_and_decay.stride(1) == 1
    assert qkv.shape[1] == 2 * k_heads * k_dim + v_heads * v_dim
    assert qkv.dtype is beta_and_decay.dtype
    assert all(x.dtype is torch.float32 for x in (a_log, dt_bias, *delta))
    assert all(x.is_contiguous() for x in (qkv, a_log, dt_bias, *delta, *rows[:-1]))
    out = qkv.new_empty(len(qkv), v_heads, v_dim)
    if len(qkv) == 0:
        return out
    prepared = prepare(*inputs, delta, rows)
    if rows.max_tokens >= CHUNK:
        run_chunks(out, qkv, prepared, delta, rows)
    grid = len(rows.slots), v_heads, triton.cdiv(v_dim, _BLOCK_V)
    _gated_delta_kernel[grid](
        out,
        qkv,
        *prepared[:-1],
        delta.state,
        delta.snapshots,
        delta.deltas,
        *rows[:-1],
        num_slots,
        len(delta.snapshots),
        HK=k_heads,
        HV=v_heads,
        DK=k_dim,
        DV=v_dim,
        RECORDS=records,
        CHUNK=CHUNK,
        BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_V=_BLOCK_V,
    )
    return out
