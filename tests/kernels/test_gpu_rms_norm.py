from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.rms_norm.triton import add_rms_norm, rms_norm

SIZES = [(1, 1), (3, 7), (1, 576), (33, 100), (5, 2049), (0, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    gpu: str, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    out = rms_norm(x.to(gpu), weight.to(gpu), 1e-5).cpu()
    if rows:
        assert_close(out, reference.rms_norm(x, weight, 1e-5))
    assert out.shape == (rows, width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES[:-1])
def test_adds_to_the_residual_in_place(
    gpu: str, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    residual = torch.randn(rows, width).to(dtype)
    updated = residual.to(gpu, copy=True)
    out = add_rms_norm(x.to(gpu), updated, weight.to(gpu), 1e-5).cpu()
    assert_close(out, reference.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(updated.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (1, 7)])
def test_normalises_the_heads_of_a_slice(
    gpu: str, reference: KernelSet, heads: int, dim: int, dtype: torch.dtype
) -> None:
    projected, weight = torch.randn(11, heads + 3, dim).to(dtype), torch.randn(dim)
    expected = reference.rms_norm(projected[:, 2 : 2 + heads], weight, 1e-6)
    out = rms_norm(projected.to(gpu)[:, 2 : 2 + heads], weight.to(gpu), 1e-6)
    assert out.is_contiguous()
    assert_close(out.cpu(), expected)


@pytest.mark.parametrize("width", [24, 577])
def test_a_row_does_not_depend_on_the_others(gpu: str, width: int) -> None:
    x, weight = torch.randn(40, width).bfloat16().to(gpu), torch.randn(width).to(gpu)
    together = rms_norm(x, weight, 1e-5)
    alone = torch.cat([rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(together, alone)


def test_a_nan_stays_in_its_row(gpu: str) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = torch.nan
    out = rms_norm(x.to(gpu), torch.ones(40).to(gpu), 1e-5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
