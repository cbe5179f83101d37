from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 77), (1, 1536), (40, 512)])
def test_equals_the_reference(
    native: KernelSet, reference: KernelSet, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * width) * 5).to(dtype)
    assert_close(native.silu_and_mul(x), reference.silu_and_mul(x))


def test_extremes(native: KernelSet) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, -88.5, 88.5, torch.inf, torch.nan])
    out = native.silu_and_mul(torch.cat((gate, torch.ones(8)))[None])[0]
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(native: KernelSet, dtype: torch.dtype) -> None:
    x = torch.randn(200, 2 * 101).to(dtype)
    native.set_num_threads(2)
    together = native.silu_and_mul(x)
    native.set_num_threads(1)
    assert torch.equal(together, torch.cat([native.silu_and_mul(row) for row in x.split(1)]))
