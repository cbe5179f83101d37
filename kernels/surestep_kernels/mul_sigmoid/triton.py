"""The output gate of gated attention and of a shared expert, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

_BLOCK = 1024


@triton.jit
def gated(x, gate, dtype: tl.constexpr):
    """Return x times the sigmoid of the gate, with operands and result rounded to dtype."""
    factor = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(dtype).to(tl.float32)
    return (x.to(tl.float32) * factor).to(dtype)


@DependentKernel
@triton.jit
def _mul_sigmoid_kernel(
    x_ptr,  # [T, W]
    gate_ptr,  # [T, W] or, if SCALAR, [T, 1]; a token every gate_stride elements
    width,  # W
    gate_stride,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, at = i < width, x_ptr + token * width + i
    gate_at = gate_ptr + token * gate_stride + (i * 0 if SCALAR else i)
    gate = tl.load(gate_at, mask=mask, other=0.0)
    tl.store(at, gated(tl.load(at, mask=mask, other=0.0), gate, dtype), mask=mask)


def mul_sigmoid(x: Tensor, gate: Tensor) -> None:
    """Gate x in place; gate may be a slice of a projection."""
    (tokens, width), gate_width = x.shape, gate.shape[1]
    assert x.is_contiguous()
    assert gate.shape == (tokens, gate_width)
    assert gate_width in (1, width)
    assert gate.stride(1) == 1 or gate_width == 1
    assert x.dtype is gate.dtype
    grid = tokens, triton.cdiv(width, _BLOCK)
    if tokens:
        _mul_sigmoid_kernel[grid](
            x, gate, width, gate.stride(0), SCALAR=gate_width == 1, BLOCK=_BLOCK
        )
