"""The gated delta rule over whole chunks of prompts in Triton (Yang et al., 2024).

With decays multiplied up from the first token of a chunk to g_1..g_C, a state S before it and d_i
what token i adds,

    (I + A) d = beta (v - g K S)      A_ij = beta_i g_i / g_j (k_i . k_j) for j < i, 0 otherwise
    o = g Q S + B d                   B_ij = g_i / g_j (q_i . k_j) for j <= i, 0 otherwise
    S becomes g_C S + (g_C / g K)^T d

One launch computes (I + A)^-1 beta and B of all chunks at once; another goes from chunk to chunk
with only products left to do. Sums are f32, but in another order than token by token, and products
are TF32: enough for models in bf16, not in f32. So only whole chunks are computed in this way, and
the sequence decides where they begin (see RecurrentRows).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.columns.gpu.recurrent_rows import (
    COLUMNS,
    row_chunked,
    row_slot,
    row_snapshot,
    row_tokens,
)
from surestep_kernels.recurrent_rows import DeltaState, RecurrentRows

from .inputs import Prepared

CHUNK = 64  # tokens
_BLOCK_V = 32


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular [CHUNK, CHUNK], line by line."""
    i = tl.arange(0, CHUNK)
    inverse = (i[:, None] == i[None, :]).to(tl.float32)
    for line in range(1, CHUNK):
        factors = tl.sum(tl.where(i[:, None] == line, a, 0.0), axis=0)
        change = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(i[:, None] == line, inverse - change[None, :], inverse)
    return inverse


@DependentKernel
@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _chunk_matrices_kernel(
    solve_ptr,  # f32[T, HV, CHUNK]: (I + A)^-1 beta, the line of each token
    mix_ptr,  # f32[T, HV, CHUNK]: B
    q_ptr,  # f32[T, HK, DK]
    k_ptr,  # f32[T, HK, DK]
    betas_ptr,  # f32[T, HV]
    log_decays_ptr,  # f32[T, HV]
    cu_rows_ptr,  # i32[R + 1]
    chunked_ptr,  # i32[R]
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, head = tl.program_id(0), tl.program_id(2)
    first, count = row_tokens(cu_rows_ptr, row)
    start = tl.program_id(1) * CHUNK
    if start >= row_chunked(chunked_ptr, row, count, CHUNK):
        return
    t, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    at, inside = first + start + t, (i < DK)[None, :]
    k_at = (at * HK + head // (HV // HK))[:, None] * DK + i[None, :]
    q = tl.load(q_ptr + k_at, mask=inside, other=0.0)
    k = tl.load(k_ptr + k_at, mask=inside, other=0.0)
    beta = tl.load(betas_ptr + at * HV + head)
    decay = tl.cumsum(tl.load(log_decays_ptr + at * HV + head), axis=0)
    ratio = tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0))
    earlier, not_later = t[None, :] < t[:, None], t[None, :] <= t[:, None]
    products = tl.dot(k, tl.trans(k), input_precision="tf32") * ratio * beta[:, None]
    solve = _inverse(tl.where(earlier, products, 0.0), CHUNK) * beta[None, :]
    mix = tl.dot(q, tl.trans(k), input_precision="tf32") * ratio
    to = (at * HV + head)[:, None] * CHUNK + t[None, :]
    tl.store(solve_ptr + to, solve)
    tl.store(mix_ptr + to, tl.where(not_later, mix, 0.0))


@triton.jit
def _run_chunk(
    state,
    out_ptr,
    qkv_ptr,
    q_ptr,
    k_ptr,
    log_decays_ptr,
    solve_ptr,
    mix_ptr,
    first,
    head,
    i,
    j,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the state after tokens first..first+CHUNK; store outputs."""
    t = tl.arange(0, CHUNK)
    at = first + t
    k_at = (at * HK + head // (HV // HK))[:, None] * DK + i[None, :]
    v_at = (at * HV + head)[:, None] * DV + j[None, :]
    m_at = (at * HV + head)[:, None] * CHUNK + t[None, :]
    k_mask, v_mask = (i < DK)[None, :], (j < DV)[None, :]
    k = tl.load(k_ptr + k_at, mask=k_mask, other=0.0)
    from_v = qkv_ptr + (at + 1)[:, None] * 2 * HK * DK + v_at
    v = tl.load(from_v, mask=v_mask, other=0.0).to(tl.float32)
    log_decays = tl.load(log_decays_ptr + at * HV + head)
    reached, whole = tl.cumsum(log_decays, axis=0), tl.sum(log_decays, axis=0)
    decay = tl.exp(reached)[:, None]
    solve = tl.load(solve_ptr + m_at)
    rest = v - decay * tl.dot(k, state, input_precision="tf32")
    deltas = tl.dot(solve, rest, input_precision="tf32")
    q = tl.load(q_ptr + k_at, mask=k_mask, other=0.0)
    mix = tl.load(mix_ptr + m_at)
    out = decay * tl.dot(q, state, input_precision="tf32")
    out = tl.dot(mix, deltas, out, input_precision="tf32")
    tl.store(out_ptr + v_at, out.to(out_ptr.dtype.element_ty), mask=v_mask)
    left = deltas * tl.exp(tl.minimum(whole - reached, 0.0))[:, None]
    return tl.dot(tl.trans(k), left, state * tl.exp(whole), input_precision="tf32")


@DependentKernel
@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _run_chunks_kernel(
    out_ptr,  # [T, HV, DV]
    qkv_ptr,  # [T, 2 HK DK + HV DV]
    q_ptr,  # f32[T, HK, DK]
    k_ptr,  # f32[T, HK, DK]
    log_decays_ptr,  # f32[T, HV]
    solve_ptr,  # f32[T, HV, CHUNK]
    mix_ptr,  # f32[T, HV, CHUNK]
    state_ptr,  # f32[S, HV, DK, DV]
    snapshots_ptr,  # f32[M, HV, DK, DV]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R + 1]
    start_ptr,  # i32[R]
    snapshot_after_ptr,  # i32[R]
    snapshot_line_ptr,  # i32[R]
    chunked_ptr,  # i32[R]
    num_slots,
    num_lines,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, head = tl.program_id(0), tl.program_id(1)
    slot, known = row_slot(slots_ptr, row, num_slots)
    first, count = row_tokens(cu_rows_ptr, row)
    chunked = row_chunked(chunked_ptr, row, count, CHUNK)
    if (not known) | (chunked == 0):
        return
    copy_at, line = row_snapshot(snapshot_after_ptr, snapshot_line_ptr, row, num_lines)
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask, tile = (i < DK)[:, None] & (j < DV)[None, :], i[:, None] * DV + j[None, :]
    state_at = state_ptr + (slot * HV + head) * DK * DV + tile
    begun = i < tl.where(tl.load(start_ptr + row) > 0, DK, 0)
    state = tl.load(state_at, mask=begun[:, None] & (j < DV)[None, :], other=0.0)
    tl.debug_barrier()  # a thread may overwrite what another reads
    for start in range(0, chunked, CHUNK):
        state = _run_chunk(
            state,
            out_ptr,
            qkv_ptr,
            q_ptr,
            k_ptr,
            log_decays_ptr,
            solve_ptr,
            mix_ptr,
            first + start,
            head,
            i,
            j,
            HK,
            HV,
            DK,
            DV,
            CHUNK,
        )
        if start + CHUNK == copy_at:
            tl.store(snapshots_ptr + (line * HV + head) * DK * DV + tile, state, mask=mask)
    tl.store(state_at, state, mask=mask)


def run_chunks(
    out: Tensor, qkv: Tensor, prepared: Prepared, delta: DeltaState, rows: RecurrentRows
) -> None:
    """Compute outputs of the leading `rows.chunked` tokens of rows; advance their states."""
    num_slots, v_heads, k_dim, v_dim = delta.state.shape
    sizes = {
        "HK": delta.keys.shape[2],
        "HV": v_heads,
        "DK": k_dim,
        "CHUNK": CHUNK,
        "BLOCK_K": max(16, triton.next_power_of_2(k_dim)),
    }
    solve, mix = delta.state.new_empty(2, len(qkv), v_heads, CHUNK)
    _chunk_matrices_kernel[len(rows.slots), rows.max_tokens // CHUNK, v_heads](
        solve,
        mix,
        prepared.q,
        prepared.k,
        prepared.betas,
        prepared.log_decays,
        rows.cu_rows,
        rows.chunked,
        num_warps=8,
        num_stages=1,
        **sizes,
    )
    _run_chunks_kernel[len(rows.slots), v_heads, triton.cdiv(v_dim, _BLOCK_V)](
        out,
        qkv,
        prepared.q,
        prepared.k,
        prepared.log_decays,
        solve,
        mix,
        delta.state,
        delta.snapshots,
        rows.slots,
        rows.cu_rows,
        rows.start,
        rows.snapshot_after,
        rows.snapshot_line,
        rows.chunked,
        num_slots,
        len(delta.snapshots),
        DV=v_dim,
        BLOCK_V=_BLOCK_V,
        num_warps=8,
        num_stages=1,
        **sizes,
    )
