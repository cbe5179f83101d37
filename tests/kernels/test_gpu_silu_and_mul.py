from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet
from surestep_kernels.silu_and_mul.triton import silu_and_mul


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 7), (5, 1024), (2, 1500), (0, 4)])
def test_equals_the_reference(
    gpu: str, reference: KernelSet, rows: int, inner: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, 2 * inner) * 3).to(dtype)
    out = silu_and_mul(x.to(gpu)).cpu()
    if rows:
        assert_close(out, reference.silu_and_mul(x))
    assert out.shape == (rows, inner)


def test_large_gates_saturate(gpu: str) -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert silu_and_mul(x.to(gpu)).cpu().tolist() == [[0.0, 200.0]]
