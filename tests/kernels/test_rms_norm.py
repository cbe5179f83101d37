from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet

SIZES = [(1, 1), (3, 7), (1, 576), (33, 100), (70, 2048)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    native: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    assert_close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_adds_to_the_residual_in_place(
    native: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    residual = torch.randn(rows, width).to(dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(native.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalises_the_heads_of_a_slice(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype
) -> None:
    heads, weight = torch.randn(5, 7, 24).to(dtype)[:, 2:5], torch.randn(24)
    assert_close(native.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(native: KernelSet, dtype: torch.dtype) -> None:
    x, weight = torch.randn(200, 577).to(dtype), torch.randn(577)
    native.set_num_threads(2)
    together = native.rms_norm(x, weight, 1e-5)
    native.set_num_threads(1)
    alone = torch.cat([native.rms_norm(row, weight, 1e-5) for row in x.split(1)])
    assert torch.equal(together, alone)


def test_a_nan_stays_in_its_row(native: KernelSet) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = torch.nan
    out = native.rms_norm(x, torch.ones(40), 1e-5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
