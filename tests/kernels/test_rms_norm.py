from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet

SIZES = [(1, 1), (3, 7), (1, 576), (33, 100), (9, 2048), (5, 2049), (0, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    assert_close(column.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_adds_to_the_residual_in_place(
    column: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    residual = torch.randn(rows, width).to(dtype)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(column.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 24), (1, 7)])
def test_normalises_the_heads_of_a_slice(
    column: KernelSet, reference: KernelSet, heads: int, dim: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(11, heads + 3, dim).to(dtype)[:, 2 : 2 + heads], torch.randn(dim)
    out = column.rms_norm(x, weight, 1e-6)
    assert out.is_contiguous()
    assert_close(out, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 577])
def test_a_row_does_not_depend_on_the_others(
    column: KernelSet, width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(40, width).to(dtype), torch.randn(width)
    assert_rows_alone(column, lambda rows: column.rms_norm(rows, weight, 1e-5), x)


def test_a_nan_stays_in_its_row(kernels: KernelSet) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = torch.nan
    out = kernels.rms_norm(x, torch.ones(40), 1e-5)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
