from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet

SIZES = [(1, 1), (3, 7), (5, 77), (1, 1536), (40, 512), (5, 1024), (0, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_equals_the_reference(
    column: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * width) * 5).to(dtype)
    assert_close(column.silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy, as interpreter
def test_extremes(kernels: KernelSet) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, -88.5, 88.5, torch.inf, torch.nan, -200, 200])
    out = kernels.silu_and_mul(torch.cat((gate, torch.ones(len(gate))))[None])[0]
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(column: KernelSet, dtype: torch.dtype) -> None:
    assert_rows_alone(column, column.silu_and_mul, torch.randn(20, 2 * 1009).to(dtype))
