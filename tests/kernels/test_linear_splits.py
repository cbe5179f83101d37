"""Unquantised products in Triton by splits of K, and who chooses among the families."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close
from surestep_common.errors import InvalidRequest
from surestep_kernels import PackedLinear, load_kernels
from surestep_kernels.columns.products.families import Products
from surestep_kernels.linear import linear_reference, pack_linear_reference
from surestep_kernels.linear import plain as ops
from surestep_kernels.linear.triton import linear
from torch import Tensor

SPLITS = 4
DEPTH = 3 * ops._BLOCK_K * SPLITS - 70  # the last split is shorter


def test_float16(gpu: str) -> None:
    """No model computes in it yet, and so no format has its name."""
    x, weight = torch.randn(3, 70).half(), torch.randn(9, 70).half()
    packed = PackedLinear(weight.to(gpu), None, 70, 9, format=None)  # type: ignore[arg-type]
    actual = ops.plain_linear(x.to(gpu), packed, torch.float32).cpu()
    assert_close(actual, x.float() @ weight.float().T)


def test_what_lies_beyond_the_rows_and_a_padded_bias_are_not_read(gpu: str) -> None:
    x, weight = torch.full((9, 70), torch.nan).bfloat16(), torch.randn(5, 70).bfloat16()
    x[:3] = 1.0
    bias = torch.cat((torch.randn(5), torch.full((3,), torch.nan)))
    packed = pack_linear_reference(weight.to(gpu), bias.to(gpu))
    actual = linear(x.to(gpu)[:3], packed, torch.float32).cpu()
    assert_close(actual, weight.float().sum(dim=1).add(bias[:5]).expand(3, 5))
    assert linear(x.to(gpu), packed)[3:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_equals_the_row_among_others(gpu: str, dtype: torch.dtype) -> None:
    """Products of one split are added without rounding, splits are not.

    So whatever adds the former, the order of the latter is seen.
    """
    sizes = 2.0 ** torch.tensor([0, 9, 18, 3]).repeat_interleave(3 * ops._BLOCK_K)[:DEPTH]
    weight = (torch.randint(-8, 8, (40, DEPTH)) * sizes).to(dtype)
    x = torch.randint(-8, 8, (ops.FEW_ROWS + 1, DEPTH)).to(dtype)
    check_rows(x.to(gpu), pack_linear_reference(weight.to(gpu), torch.randn(40, device=gpu)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(1, 2048), (200, 2048), (40000, 256)])
def test_a_row_of_any_numbers_equals_the_row_among_others(
    gpu: str, columns: int, depth: int, dtype: torch.dtype
) -> None:
    if gpu == "cpu":
        pytest.skip("the interpreter's products are NumPy's")
    weight = torch.randn(columns, depth, device=gpu).to(dtype)
    check_rows(torch.randn(700, depth, device=gpu).to(dtype), pack_linear_reference(weight))


def check_rows(x: Tensor, packed: PackedLinear) -> None:
    """Bits of the first and the last row, and of all in runs of several lengths."""
    for out_dtype in {x.dtype, torch.float32}:
        together = linear(x, packed, out_dtype)
        for at in (0, len(x) - 1):
            assert torch.equal(linear(x[at : at + 1], packed, out_dtype)[0], together[at])
        for count in (4, 63, 65, 130):
            assert torch.equal(linear(x[-count:], packed, out_dtype), together[-count:])


def test_logits_are_compiled_once_for_any_number_of_rows() -> None:
    few, many = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (1, ops.FEW_ROWS + 1))
    packed = pack_linear_reference(torch.empty(128256, 64, device="meta"))
    alike = {ops._tiles(x, packed, torch.float32) for x in (few, many)}
    assert len(alike) == 1
    assert ops._tiles(few, packed, None).rows < ops._tiles(many, packed, None).rows


@pytest.mark.parametrize(
    ("rows", "columns", "apart"),
    [
        *((1, 2048, True), (256, 2048, True), (257, 2048, False)),
        *((64, 16384, True), (65, 16384, False), (128, 8192, True), (192, 8192, False)),
    ],
)
def test_splits_are_apart_where_tiles_are_too_few_programs(
    rows: int, columns: int, apart: bool
) -> None:
    x = torch.empty(rows, 64, dtype=torch.bfloat16, device="meta")
    packed = pack_linear_reference(torch.empty(columns, 64, device="meta"))
    assert ops._tiles(x, packed, None).apart is apart


@pytest.mark.parametrize(("columns", "splits"), [(40, SPLITS), (40000, 1)])
def test_splits_follow_from_the_weight(columns: int, splits: int) -> None:
    """The weight whose splits are tested has some, a wide one has none."""
    packed = pack_linear_reference(torch.empty(columns, DEPTH, device="meta"))
    assert -(-DEPTH // (ops._BLOCK_K * ops._per_split(packed))) == splits


def test_the_backend_is_a_choice_on_cuda() -> None:
    families = {"auto": "triton", "triton": "triton", "triton_sequential": "triton_sequential"}
    for backend, family in (families | {"torch": "torch"}).items():
        products = load_kernels("cuda", linear_backend=backend).products
        assert isinstance(products, Products)
        assert products.family == family
        assert products.is_open is (backend == "auto")
    with pytest.raises(InvalidRequest) as raised:
        load_kernels("cpu", linear_backend="torch")
    assert raised.value.param == "linear_backend"


def test_cublas_is_torch(gpu: str) -> None:
    x, weight = torch.randn(3, 64).bfloat16().to(gpu), torch.randn(9, 64).bfloat16().to(gpu)
    packed = pack_linear_reference(weight)
    expected = linear_reference(x, packed, torch.float32)
    assert torch.equal(Products("torch").linear(x, packed, torch.float32), expected)
