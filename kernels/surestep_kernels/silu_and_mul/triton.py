"""The gated activation of a Llama-style MLP in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels
from surestep_kernels.linear.splits import PartialSums, load_total

_BLOCK = 1024
_BLOCK_OF_SPLITS = 256  # columns: a program reads them twice from every split
# Of gelu, as x * sigmoid(LINEAR * x + CUBIC * x^3).
_LINEAR, _CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.07135481627159535)


@triton.jit
def times_sigmoid(x, at):
    """Return x * sigmoid(at)."""
    small = tl.exp(-tl.abs(at))  # at most 1
    return x * tl.where(at < 0, small, 1.0) / (1.0 + small)


@triton.jit
def activate(
    out_ptr,
    sums_ptr,
    bias_ptr,
    row,
    column,
    rows,
    inner,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr = False,
):
    """Compute some columns of a row of silu_and_mul, or of gelu_and_mul."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    at, mask, width = row * 2 * inner + column, column < inner, 2 * inner
    gate = load_total(sums_ptr, bias_ptr, at, column, mask, rows, width, SPLITS, HAS_BIAS)
    column += inner
    up = load_total(sums_ptr, bias_ptr, at + inner, column, mask, rows, width, SPLITS, HAS_BIAS)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    at_sigmoid = gate * (_LINEAR + _CUBIC * (gate * gate)) if GELU else gate
    active = times_sigmoid(gate, at_sigmoid).to(dtype)
    out = (active.to(tl.float32) * up).to(dtype)
    tl.store(out_ptr + row * inner + column - inner, out, mask=mask)


@DependentKernel
@triton.jit(do_not_specialize=["rows"])
def _silu_and_mul_kernel(
    out_ptr,  # [T, I]
    sums_ptr,  # f32[SPLITS, T, 2 I], or x [1, T, 2 I]
    bias_ptr,  # [2 I]; HAS_BIAS only
    rows,  # T
    inner,  # I
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    activate(out_ptr, sums_ptr, bias_ptr, row, column, rows, inner, SPLITS, HAS_BIAS, GELU)


def silu_and_mul(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return silu_and_mul_of_partials(PartialSums.whole(x))


def silu_and_mul_of_partials(x: PartialSums) -> Tensor:
    """Fuse silu_and_mul_reference with adding up the splits of the product x."""
    return activate_partials(x, gelu=False)


def activate_partials(x: PartialSums, *, gelu: bool) -> Tensor:
    """Fuse either activation with adding up the splits of the product x."""
    splits, rows, width = x.sums.shape
    assert width % 2 == 0
    out = x.sums.new_empty(rows, width // 2, dtype=x.dtype)
    block = _BLOCK if x.is_final else _BLOCK_OF_SPLITS
    grid = rows, triton.cdiv(width // 2, block)
    options = {"SPLITS": splits, "HAS_BIAS": x.bias is not None, "GELU": gelu, "BLOCK": block}
    if out.numel():
        arguments = out, *x[:2], rows, width // 2
        _silu_and_mul_kernel[grid](*arguments, num_warps=block // 256, **options)
    return out
