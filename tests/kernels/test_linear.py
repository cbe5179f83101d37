from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_kernels import KernelSet

IN_C = [(1, 1), (7, 5), (33, 1), (64, 64), (100, 77), (960, 576), (300, 1537)]  # N, K
IN_TRITON = [(1, 7), (7, 64), (70, 145), (130, 320)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("column", "columns", "depth", "rows"),
    [
        *(("c", *shape, rows) for shape in IN_C for rows in (1, 2, 3, 4, 7, 12, 50)),
        *(("triton", *shape, rows) for shape in IN_TRITON for rows in (1, 67)),
    ],
    indirect=["column"],
)
def test_equals_the_exact_product(
    column: KernelSet, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
        packed = column.pack_linear(weight, bias)
        assert_close(column.linear(x, packed, torch.float32), expected)
        assert_close(column.linear(x, packed), expected.to(dtype))


def test_float32_logits_are_not_rounded_to_bfloat16(column: KernelSet) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(200, 64).bfloat16()
    logits = column.linear(x, column.pack_linear(weight), torch.float32)
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


def test_a_nan_stays_in_its_row(column: KernelSet) -> None:
    x = torch.randn(5, 64)
    x[2, 63] = torch.nan
    out = column.linear(x, column.pack_linear(torch.randn(50, 64)))
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_no_rows(column: KernelSet) -> None:
    packed = column.pack_linear(torch.randn(50, 64))
    assert column.linear(torch.empty(0, 64), packed).shape == (0, 50)
