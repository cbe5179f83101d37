"""The gated norm behind a gated delta layer, in Triton. A program has one head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels


@DependentKernel
@triton.jit
def _rms_norm_gated_kernel(
    out_ptr,  # [T, H, D]
    x_ptr,  # [T, H, D]
    gate_ptr,  # [T, H, D], a token every gate_stride elements
    weight_ptr,  # f32[D]
    eps,
    gate_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask, at = i < D, (token * H + head) * D + i
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate_at = gate_ptr + token * gate_stride + head * D + i
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0)
    normed = x * (1.0 / tl.sqrt_rn(tl.sum(x * x) / D + eps))
    scaled = (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    out = scaled * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + at, out.to(dtype), mask=mask)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise and gate x; gate may be a slice of a projection."""
    tokens, heads, width = x.shape
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert gate.shape == x.shape
    assert gate.stride()[1:] == (width, 1)
    assert x.dtype is gate.dtype
    assert weight.dtype is torch.float32
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    if tokens:
        _rms_norm_gated_kernel[tokens, heads](
            out,
            x,
            gate,
            weight,
            eps,
            gate.stride(0),
            H=heads,
            D=width,
            BLOCK=block,
            num_warps=min(8, max(1, block // 128)),
        )
    return out
