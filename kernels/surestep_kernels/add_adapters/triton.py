"""Shares of adapters in Triton: inputs to low rank, then low rank to outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import AdapterWeights

_INPUTS, _OUTPUTS, _ROWS = 256, 256, 4


@DependentKernel
@triton.jit
def _shrink_kernel(
    low_ptr,  # f32[T, P * R]
    x_ptr,  # [T, K]
    places_ptr,  # i32[T]
    a_ptr,  # [S, P, R, K]
    ranks_ptr,  # i32[S, P]
    scales_ptr,  # f32[S, P]
    inputs,  # K
    parts,  # P
    most,  # R
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + token).to(tl.int64)
    if place >= 0:
        of_part = place * parts + part
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        counts = row < tl.load(ranks_ptr + of_part)
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, inputs, BLOCK):
            k = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + token * inputs + k, mask=k < inputs, other=0.0).to(tl.float32)
            at = a_ptr + (of_part * most + row[:, None]) * inputs + k[None, :]
            a = tl.load(at, mask=counts[:, None] & (k < inputs)[None, :], other=0.0)
            sums += a.to(tl.float32) * x[None, :]
        low = tl.sum(sums, axis=1) * tl.load(scales_ptr + of_part)
        tl.store(low_ptr + (token * parts + part) * most + row, low, mask=counts)


@DependentKernel
@triton.jit
def _expand_kernel(
    y_ptr,  # [T, N]
    low_ptr,  # f32[T, P * R]
    places_ptr,  # i32[T]
    b_ptr,  # [S, R, N]
    ranks_ptr,  # i32[S, P]
    spans_ptr,  # i64[G, 3]
    outputs,  # N
    parts,  # P
    most,  # R
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    token, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + token).to(tl.int64)
    if place >= 0:
        part = tl.load(spans_ptr + span * 3 + 2)
        rank = tl.load(ranks_ptr + place * parts + part)
        n = tl.load(spans_ptr + span * 3) + tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = n < tl.load(spans_ptr + span * 3 + 1)
        total = tl.zeros((BLOCK,), tl.float32)
        for r in range(rank):
            low = tl.load(low_ptr + (token * parts + part) * most + r)
            b = tl.load(b_ptr + (place * most + r) * outputs + n, mask=mask, other=0.0)
            total += low * b.to(tl.float32)
        y = tl.load(y_ptr + token * outputs + n, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + token * outputs + n, (y + total).to(y_ptr.dtype.element_ty), mask=mask)


def add_adapters(y: Tensor, x: Tensor, places: Tensor, weights: AdapterWeights) -> None:
    """Compute add_adapters_reference."""
    a, b, ranks, scales, spans = weights
    (tokens, inputs), (_, parts, most, _), outputs = x.shape, a.shape, b.shape[2]
    assert y.is_contiguous()
    assert x.is_contiguous()
    assert y.shape == (tokens, outputs)
    if not tokens:
        return
    low = torch.empty(tokens, parts * most, dtype=torch.float32, device=x.device)
    grid = tokens, parts, triton.cdiv(most, _ROWS)
    sizes = inputs, parts, most
    _shrink_kernel[grid](low, x, places, a, ranks, scales, *sizes, ROWS=_ROWS, BLOCK=_INPUTS)
    grid = tokens, len(spans), triton.cdiv(outputs, _OUTPUTS)
    sizes = outputs, parts, most
    _expand_kernel[grid](y, low, places, b, ranks, spans, *sizes, BLOCK=_OUTPUTS)
