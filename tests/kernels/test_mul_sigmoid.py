from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet
from torch import Tensor


@pytest.mark.parametrize(("rows", "width"), [(37, 40), (5, 1032), (0, 40)])
@pytest.mark.parametrize("one_gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_with_a_slice_as_gate(
    column: KernelSet,
    reference: KernelSet,
    dtype: torch.dtype,
    one_gate: bool,
    rows: int,
    width: int,
) -> None:
    x, projection = torch.randn(rows, width).to(dtype), torch.randn(rows, width + 24).to(dtype)
    gate, expected = projection[:, 3 : 4 if one_gate else 3 + width], x.clone()
    column.mul_sigmoid(x, gate)
    reference.mul_sigmoid(expected, gate)
    assert_close(x, expected)


@pytest.mark.parametrize("gate_width", [1, 1032])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(
    column: KernelSet, gate_width: int, dtype: torch.dtype
) -> None:
    def gated(x: Tensor, gate: Tensor) -> Tensor:
        x = x.clone()
        column.mul_sigmoid(x, gate)
        return x

    x, gate = torch.randn(20, 1032).to(dtype), torch.randn(20, gate_width).to(dtype)
    assert_rows_alone(column, gated, x, gate)
