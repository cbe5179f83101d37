from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet

SHAPES = [(1, 1), (7, 5), (33, 1), (64, 64), (100, 77), (960, 576), (300, 1537)]  # N, K


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12, 50])
def test_equals_the_reference(
    native: KernelSet, reference: KernelSet, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    bias = torch.randn(columns).to(dtype)
    for b in (None, bias):
        actual = native.linear(x, native.pack_linear(weight, b))
        assert_close(actual, reference.linear(x, reference.pack_linear(weight, b)))


def test_float32_logits_are_not_rounded_to_bfloat16(native: KernelSet) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(200, 64).bfloat16()
    logits = native.linear(x, native.pack_linear(weight), torch.float32)
    assert_close(logits, x.float() @ weight.float().T)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(7, 5), (100, 77), (960, 576), (576, 1536)])
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, columns: int, depth: int, dtype: torch.dtype
) -> None:
    weight = native.pack_linear(torch.randn(columns, depth).to(dtype), torch.randn(columns))
    x = torch.randn(150, depth).to(dtype)  # more rows than one cache block takes
    native.set_num_threads(2)
    together = native.linear(x, weight)
    for trial in range(40):
        native.set_num_threads(1 + trial % 3)
        chosen = torch.randperm(150)[: torch.randint(1, 40, ()).item()]
        assert torch.equal(native.linear(x[chosen], weight), together[chosen])


def test_a_nan_stays_in_its_row(native: KernelSet) -> None:
    x = torch.randn(5, 64)
    x[2, 63] = torch.nan
    out = native.linear(x, native.pack_linear(torch.randn(50, 64)))
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_no_rows(native: KernelSet) -> None:
    packed = native.pack_linear(torch.randn(50, 64))
    assert native.linear(torch.empty(0, 64), packed).shape == (0, 50)
