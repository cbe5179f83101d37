"""The gated activation of gpt-oss's experts in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import ALPHA

_BLOCK = 1024
_ALPHA = tl.constexpr(ALPHA)


@triton.jit
def clamped_swiglu_of(gate, up, limit):
    """Return (up + 1) * gate * sigmoid(ALPHA * gate) in fp32; comparisons let NaN pass."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1.0) * (gate / (1.0 + tl.exp(gate * -_ALPHA)))


@DependentKernel
@triton.jit
def _clamped_swiglu_kernel(
    out_ptr,  # [T, I]
    x_ptr,  # [T, 2 I]
    limit,
    inner,  # I
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, mask = x_ptr + row * 2 * inner + column, column < inner
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=mask, other=0.0).to(tl.float32)
    out = clamped_swiglu_of(gate, up, limit).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * inner + column, out, mask=mask)


def clamped_swiglu(x: Tensor, limit: float) -> Tensor:
    """Compute clamped_swiglu_reference."""
    rows, width = x.shape
    assert x.is_contiguous()
    assert width % 2 == 0
    out = x.new_empty(rows, width // 2)
    if out.numel():
        grid = rows, triton.cdiv(width // 2, _BLOCK)
        _clamped_swiglu_kernel[grid](out, x, float(limit), width // 2, BLOCK=_BLOCK)
    return out
