from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, assert_rows_alone
from surestep_kernels import KernelSet


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 11, 37])
def test_equals_the_reference_with_a_slice_as_gate(
    column: KernelSet, reference: KernelSet, rows: int, dtype: torch.dtype
) -> None:
    x, projection = torch.randn(rows, 3, 24).to(dtype), torch.randn(rows, 100).to(dtype)
    gate, weight = projection[:, 9:81].unflatten(1, (3, 24)), torch.randn(24)
    out = column.rms_norm_gated(x, gate, weight, 1e-6)
    assert_close(out, reference.rms_norm_gated(x, gate, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(column: KernelSet, dtype: torch.dtype) -> None:
    (x, gate), weight = torch.randn(2, 20, 3, 400).to(dtype), torch.randn(400)
    assert_rows_alone(column, lambda x, z: column.rms_norm_gated(x, z, weight, 1e-6), x, gate)
