"""Gated norm and output gate."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.mul_sigmoid.triton import mul_sigmoid
from surestep_kernels.rms_norm_gated.triton import rms_norm_gated


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_gated(gpu: str, reference: KernelSet, dtype: torch.dtype) -> None:
    x, projection = torch.randn(11, 3, 24).to(dtype), torch.randn(11, 100).to(dtype)
    weight = torch.randn(24)

    def gated(rows: slice) -> torch.Tensor:
        gate = projection.to(gpu)[rows, 9:81].unflatten(1, (3, 24))
        return rms_norm_gated(x.to(gpu)[rows], gate, weight.to(gpu), 1e-6).cpu()

    out = gated(slice(None))
    expected = reference.rms_norm_gated(x, projection[:, 9:81].unflatten(1, (3, 24)), weight, 1e-6)
    assert_close(out, expected)
    assert torch.equal(out, torch.cat([gated(slice(i, i + 1)) for i in range(11)]))
    assert gated(slice(0)).shape == (0, 3, 24)


@pytest.mark.parametrize("gate_width", [1, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mul_sigmoid(gpu: str, reference: KernelSet, gate_width: int, dtype: torch.dtype) -> None:
    x, projection = torch.randn(5, 1030).to(dtype), torch.randn(5, 1100).to(dtype)
    gate, expected = projection[:, 3 : 3 + gate_width], x.clone()
    out = x.clone().to(gpu)
    reference.mul_sigmoid(expected, gate)
    mul_sigmoid(out, projection.to(gpu)[:, 3 : 3 + gate_width])
    assert_close(out.cpu(), expected)
    mul_sigmoid(out[:0], projection.to(gpu)[:0, :1])
