"""The inputs of a gated delta layer's kernels, prepared once for all programs of a row.

Programs of one head each would all normalise the same queries and keys; and records shared by heads
could not be overwritten by one program while another still folds them. So a separate launch
normalises, computes the weights of the update, copies the records to fold and writes the new ones.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.columns.gpu.recurrent_rows import COLUMNS, row_pending, row_slot, row_tokens
from surestep_kernels.recurrent_rows import DeltaState, RecurrentRows

_BLOCK_T = 16  # tokens of a program; more where a window may be longer


class Prepared(NamedTuple):
    """Inputs of the rule for each token and for each record to fold, f32."""

    q: Tensor  # [T, Hk, dk] normalised and scaled
    k: Tensor  # [T, Hk, dk] normalised
    betas: Tensor  # [T, Hv]
    decays: Tensor  # [T, Hv]
    pending_keys: Tensor  # [R, W, Hk, dk]
    pending_decays: Tensor  # [R, W, Hv]
    log_decays: Tensor  # [T, Hv]


@triton.jit
def _normalised(x):
    """Normalise rows [T, D] to length 1."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) + 1e-6))[:, None]


@triton.jit
def _softplus(x):
    small = tl.minimum(x, 20.0)
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(small)))


@triton.jit
def _prepare_records(
    keys_ptr,
    decays_ptr,
    pending_keys_ptr,
    pending_decays_ptr,
    new_keys,  # [BLOCK_T, BLOCK_K]
    new_decays,  # [BLOCK_T, BLOCK_G]
    slot,
    pending,
    recorded,  # how many of the new ones are records
    head,
    i,  # [BLOCK_K]
    g,  # [BLOCK_G]
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Copy the records of one key head that the row folds, then overwrite them with its own."""
    t, row = tl.arange(0, BLOCK_T).to(tl.int64), tl.program_id(0).to(tl.int64)
    k_mask, g_mask = (i < DK)[None, :], (g < HV // HK)[None, :]
    k_at = (t * HK + head)[:, None] * DK + i[None, :]
    g_at = t[:, None] * HV + (head * (HV // HK) + g)[None, :]
    old, new = (t < pending)[:, None], (t < recorded)[:, None]
    k_from, g_from = slot * RECORDS * HK * DK, slot * RECORDS * HV
    old_keys = tl.load(keys_ptr + k_from + k_at, mask=old & k_mask, other=0.0)
    old_decays = tl.load(decays_ptr + g_from + g_at, mask=old & g_mask, other=0.0)
    tl.debug_barrier()  # a thread may overwrite what another reads
    tl.store(pending_keys_ptr + row * RECORDS * HK * DK + k_at, old_keys, mask=old & k_mask)
    tl.store(pending_decays_ptr + row * RECORDS * HV + g_at, old_decays, mask=old & g_mask)
    tl.store(keys_ptr + k_from + k_at, new_keys, mask=new & k_mask)
    tl.store(decays_ptr + g_from + g_at, new_decays, mask=new & g_mask)


@DependentKernel
@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _prepare_kernel(
    qkv_ptr,  # [T, 2 HK DK + HV DV]
    gates_ptr,  # [T, 2 HV]: b, then a; a token every gates_stride elements
    a_log_ptr,  # f32[HV]
    dt_bias_ptr,  # f32[HV]
    q_ptr,  # f32[T, HK, DK]
    k_ptr,  # f32[T, HK, DK]
    betas_ptr,  # f32[T, HV]
    new_decays_ptr,  # f32[T, HV]
    pending_keys_ptr,  # f32[R, RECORDS, HK, DK]
    pending_decays_ptr,  # f32[R, RECORDS, HV]
    log_decays_ptr,  # f32[T, HV]
    keys_ptr,  # f32[S, RECORDS, HK, DK]
    decays_ptr,  # f32[S, RECORDS, HV]
    slots_ptr,  # i64[R]
    cu_rows_ptr,  # i32[R + 1]
    pending_ptr,  # i32[R]
    window_ptr,  # i32[R]
    num_slots,
    gates_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    wait_for_earlier_kernels()
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, known = row_slot(slots_ptr, row, num_slots)
    first, count = row_tokens(cu_rows_ptr, row)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    i, g = tl.arange(0, BLOCK_K).to(tl.int64), tl.arange(0, BLOCK_G).to(tl.int64)
    tokens, there, v_heads = first + t, (t < count)[:, None], head * (HV // HK) + g
    k_mask, g_mask = there & (i < DK)[None, :], there & (g < HV // HK)[None, :]
    qkv_at = tokens[:, None] * (2 * HK * DK + HV * DV) + (head * DK + i)[None, :]
    q = _normalised(tl.load(qkv_ptr + qkv_at, mask=k_mask, other=0.0).to(tl.float32)) * scale
    k = _normalised(tl.load(qkv_ptr + HK * DK + qkv_at, mask=k_mask, other=0.0).to(tl.float32))
    k_at = (tokens * HK + head)[:, None] * DK + i[None, :]
    tl.store(q_ptr + k_at, q, mask=k_mask)
    tl.store(k_ptr + k_at, k, mask=k_mask)
    gates_at = gates_ptr + tokens[:, None] * gates_stride + v_heads[None, :]
    b = tl.load(gates_at, mask=g_mask, other=0.0).to(tl.float32)
    a = tl.load(gates_at + HV, mask=g_mask, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + v_heads, mask=g < HV // HK, other=0.0)[None, :]
    bias = tl.load(dt_bias_ptr + v_heads, mask=g < HV // HK, other=0.0)[None, :]
    log_decay = -tl.exp(a_log) * _softplus(a + bias)
    decay, g_at = tl.exp(log_decay), tokens[:, None] * HV + v_heads[None, :]
    tl.store(betas_ptr + g_at, 1.0 / (1.0 + tl.exp(-b)), mask=g_mask)
    tl.store(new_decays_ptr + g_at, decay, mask=g_mask)
    tl.store(log_decays_ptr + g_at, log_decay, mask=g_mask)
    if known & (tl.program_id(2) == 0):
        pending = row_pending(pending_ptr, row, RECORDS)
        recorded = tl.where(tl.load(window_ptr + row) != 0, tl.minimum(count, RECORDS), 0)
        _prepare_records(
            keys_ptr,
            decays_ptr,
            pending_keys_ptr,
            pending_decays_ptr,
            k,
            decay,
            slot,
            pending,
            recorded,
            head,
            i,
            g,
            HK,
            HV,
            DK,
            RECORDS,
            BLOCK_T,
        )


def prepare(
    qkv: Tensor,
    gates: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    delta: DeltaState,
    rows: RecurrentRows,
) -> Prepared:
    """Prepare the tokens; windows replace the keys and decays of their slot's records."""
    (num_slots, records, k_heads, k_dim), v_heads = delta.keys.shape, delta.state.shape[1]
    tokens, num_rows = len(qkv), len(rows.slots)
    new = delta.keys.new_empty
    prepared = Prepared(
        q=new(tokens, k_heads, k_dim),
        k=new(tokens, k_heads, k_dim),
        betas=new(tokens, v_heads),
        decays=new(tokens, v_heads),
        pending_keys=new(num_rows, records, k_heads, k_dim),
        pending_decays=new(num_rows, records, v_heads),
        log_decays=new(tokens, v_heads),
    )
    block = max(_BLOCK_T, triton.next_power_of_2(records))
    grid = num_rows, k_heads, triton.cdiv(rows.max_tokens, block)
    _prepare_kernel[grid](
        qkv,
        gates,
        a_log,
        dt_bias,
        *prepared,
        delta.keys,
        delta.decays,
        rows.slots,
        rows.cu_rows,
        rows.pending,
        rows.window,
        num_slots,
        gates.stride(0),
        k_dim**-0.5,
        HK=k_heads,
        HV=v_heads,
        DK=k_dim,
        DV=delta.state.shape[3],
        RECORDS=records,
        BLOCK_T=block,
        BLOCK_K=triton.next_power_of_2(k_dim),
        BLOCK_G=triton.next_power_of_2(v_heads // k_heads),
    )
    return prepared
