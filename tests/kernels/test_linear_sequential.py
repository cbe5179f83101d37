from __future__ import annotations

import pytest
import torch
from support.kernels import matrix_instructions
from support.kernels.cases import assert_close
from surestep_kernels import PackedLinear
from surestep_kernels.columns.products import families as products
from surestep_kernels.columns.products.families import ProductFamily, Products
from surestep_kernels.linear import linear_reference, pack_linear_reference
from surestep_kernels.linear import sequential as sequential_linear
from surestep_kernels.linear.plain import plain_linear
from surestep_kernels.linear.sequential import TILES, Tile, multiply_into, tile_of
from torch import Tensor

BF16 = torch.bfloat16
ROWS = (1, 9, 33, 65, 257)


def whole_numbers(rows: int, columns: int, depth: int, device: str) -> tuple[Tensor, PackedLinear]:
    """Whose products are exact, in whatever order."""
    x, weight = (torch.randint(-8, 8, (n, depth)).to(BF16) for n in (rows, columns))
    return x.to(device), pack_linear_reference(weight.to(device), torch.randn(columns).to(device))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "depth"), [(1, 7), (35, 290)])
def test_equals_the_reference(gpu: str, rows: int, columns: int, depth: int) -> None:
    x, packed = whole_numbers(rows, columns, depth, gpu)
    assert packed.bias is not None
    expected = x.cpu().float() @ packed.data.cpu().float().T + packed.bias.cpu()
    for out_dtype in (None, torch.float32):
        actual = sequential_linear.sequential_linear(x, packed, out_dtype)
        assert torch.equal(actual.cpu(), expected.to(out_dtype or BF16))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_computes_the_same(gpu: str, tile: Tile) -> None:
    """One row more than it has, and one column."""
    x, packed = whole_numbers(tile.rows + 1, tile.columns + 1, tile.depth + 24, gpu)
    y = torch.empty(len(x), packed.out_features, device=gpu)
    multiply_into(y, x, packed, tile)
    assert torch.equal(y, plain_linear(x, packed, torch.float32))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_sum_goes_along_k(gpu: str, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of what an instruction takes, none of which is rounded in itself."""
    depth, k = 290, matrix_instructions.K
    sizes = 2.0 ** torch.randint(0, 20, (depth // k + 1,)).repeat_interleave(k)[:depth]
    weight = (torch.randint(-8, 8, (3, depth)) * sizes).to(BF16)
    x = torch.randint(-8, 8, (2, depth)).to(BF16)
    if gpu == "cpu":
        matrix_instructions.install(monkeypatch)
    expected = torch.zeros(2, 3)
    for first in range(0, depth, k):
        part = slice(first, first + k)
        expected += x[:, part].float() @ weight[:, part].float().T
    y = torch.empty(2, 3, device=gpu)
    multiply_into(y, x.to(gpu), pack_linear_reference(weight.to(gpu)), tile)
    if gpu == "cpu":  # a card truncates where this rounds
        assert torch.equal(y, expected)
    backwards = x.flip(1).float() @ weight.flip(1).float().T
    assert_close(y.cpu(), backwards)


def test_what_lies_beyond_is_not_read(gpu: str) -> None:
    x, weight = torch.full((40, 70), torch.nan).to(BF16), torch.randn(5, 70).to(BF16)
    x[:3] = 1.0
    bias = torch.cat((torch.randn(5), torch.full((3,), torch.nan)))
    packed = pack_linear_reference(weight.to(gpu), bias.to(gpu))
    actual = sequential_linear.sequential_linear(x.to(gpu)[:3], packed, torch.float32).cpu()
    assert_close(actual, weight.float().sum(dim=1).add(bias[:5]).expand(3, 5))
    assert sequential_linear.sequential_linear(x.to(gpu), packed)[3:].isnan().all()


def test_no_rows(gpu: str) -> None:
    packed = pack_linear_reference(torch.randn(5, 8, device=gpu).to(BF16))
    x = torch.empty(0, 8, dtype=BF16, device=gpu)
    assert sequential_linear.sequential_linear(x, packed).shape == (0, 5)


def test_few_rows_make_a_program_for_every_multiprocessor() -> None:
    """Of an H200, all but four; and programs of many rows are few."""
    narrow, wide = (pack_linear_reference(torch.empty(n, 8, device="meta")) for n in (2048, 16384))
    for rows in (1, 8, 9, 32):
        assert -(-2048 // tile_of(rows, narrow).columns) == 128
        assert -(-16384 // tile_of(rows, wide).columns) == 256
    assert tile_of(4096, wide)[:2] == (128, 256)
    assert tile_of(4096, wide, torch.float32) == tile_of(1, wide, torch.float32)


@pytest.mark.parametrize("family", ProductFamily)
def test_a_family_serves_all_rows(gpu: str, family: ProductFamily) -> None:
    chosen = Products()
    chosen.use(family)
    for rows in (0, 1, 40, 300):
        x, packed = whole_numbers(rows, 40, 72, gpu)
        expected = linear_reference(x.cpu(), pack_linear_reference(packed.data.cpu()))
        packed = pack_linear_reference(packed.data)
        assert torch.equal(chosen.linear(x, packed).cpu(), expected)


def test_float32_is_multiplied_by_splits_in_every_family_of_ours(gpu: str) -> None:
    chosen = Products("triton_sequential")
    x, packed = torch.randn(3, 70).to(gpu), pack_linear_reference(torch.randn(9, 70).to(gpu))
    assert torch.equal(chosen.linear(x, packed), plain_linear(x, packed))


def test_cublas_is_given_numbers_of_rows_that_were_checked(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_ALIGNMENT", 64)  # that of the CPU's allocator
    counts = []
    multiply = torch.mm

    def noted(x: Tensor, *args: Tensor, **options: Tensor) -> Tensor:
        counts.append(len(x))
        return multiply(x, *args, **options)

    monkeypatch.setattr(torch, "mm", noted)
    chosen = Products()
    chosen.use(ProductFamily.SEQUENTIAL, {(40, 72)})
    x, packed = whole_numbers(600, 40, 72, gpu)
    expected = linear_reference(x.cpu(), pack_linear_reference(packed.data.cpu()))
    plain = pack_linear_reference(packed.data)
    monkeypatch.setattr(products, "MOST_PIECES", 1)
    assert torch.equal(chosen.linear(x, plain).cpu(), expected)
    assert counts == [256, 256]
    counts.clear()
    others = (
        (x[:256], plain, None),
        (x, packed, None),  # has a bias
        (x, plain, torch.float32),
        (x[1:], plain, None),  # not aligned as it was
        (x, pack_linear_reference(packed.data[:39]), None),
    )
    for inputs, weight, out_dtype in others:
        chosen.linear(inputs, weight, out_dtype)
    assert counts == []


def test_one_weight_of_each_kind_is_met() -> None:
    chosen, fixed = Products(), Products("triton")
    weights = [pack_linear_reference(torch.empty(4, 8, dtype=BF16)) for _ in range(3)]
    weights += [pack_linear_reference(torch.empty(4, 8, dtype=BF16), torch.empty(4))]
    weights += [pack_linear_reference(torch.empty(4, 8))]
    for of in (chosen, fixed):
        of.register(weights)
    assert chosen.weights == [weights[0], weights[3]]
    assert fixed.weights == []
    chosen.use(ProductFamily.SPLITS)
    assert chosen.weights == []
