"""Quantised products in Triton: tiles, splits, and codes on their way."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.cases import DTYPES, FORMATS, assert_close, make_quantized
from support.kernels.together import product_together
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.linear import QuantizedWeight, WeightFormat, weight_tile
from surestep_kernels.linear import triton as ops
from surestep_kernels.linear.splits import sum_partials
from torch import Tensor


def pack(weight: QuantizedWeight, bias: Tensor | None, device: str) -> PackedLinear:
    """A weight that lies on a device, packed there."""
    parts = weight.codes, weight.scales, weight.zeros
    codes, scales, zeros = (None if part is None else part.to(device) for part in parts)
    assert codes is not None
    assert scales is not None
    moved = QuantizedWeight(codes, scales, zeros, weight.group_size)
    return ops.pack_quantized(moved, None if bias is None else bias.to(device))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("rows", [17, 40, 260])
def test_all_tiles_equal_the_reference(
    gpu: str, reference: KernelSet, format_: WeightFormat, rows: int
) -> None:
    """Five splits; the last group holds one input."""
    weight, bias = make_quantized(format_, 70, 145, 16), torch.randn(70)
    x = torch.randn(rows, 145).bfloat16()
    packed = pack(weight, bias, gpu)
    assert ops.groups_per_split(packed) == 2
    expected = reference.linear(x, reference.pack_quantized(weight, bias), torch.float32)
    assert_close(ops.linear(x.to(gpu), packed, torch.float32).cpu(), expected)


def exact_sums(format_: WeightFormat, columns: int, depth: int, group: int) -> QuantizedWeight:
    """Whose sums over a group no order changes, if x is whole numbers; sums of groups it does."""
    made = make_quantized(format_, columns, depth, group)
    scales = made.scales * 2.0 ** torch.randint(0, 20, made.scales.shape)
    if format_ is not WeightFormat.FP8:
        return QuantizedWeight(made.codes, scales, made.zeros, group)
    codes = torch.randint(-16, 17, (columns, depth)).float().to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales, None, group)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_is_the_same_alone_and_in_company(gpu: str, format_: WeightFormat) -> None:
    """Whatever the width of an instruction."""
    packed = pack(exact_sums(format_, 40, 400, 32), torch.randn(40), gpu)
    assert 1 < ops.groups_per_split(packed) < 13
    x = torch.randint(-8, 9, (9, 400)).bfloat16().to(gpu)
    expected = torch.cat([ops.linear(row, packed, torch.float32) for row in x.split(1)])
    for rows, widths in product((9, 40, 130), (ops.ONE_WIDTH, ops.ALL_WIDTHS)):
        many = x.repeat(-(-rows // 9), 1)[:rows]
        out = sum_partials(ops.quantized_partials(many, packed, torch.float32, widths))
        assert torch.equal(out, expected.repeat(-(-rows // 9), 1)[:rows])


@pytest.mark.parametrize("format_", FORMATS)
def test_splits_apart_and_together_have_equal_bits(gpu: str, format_: WeightFormat) -> None:
    """In tiles of both sizes; a mutant that adds all groups in one sum is seen."""
    packed = pack(exact_sums(format_, 40, 400, 32), torch.randn(40), gpu)
    x, per_split = torch.randint(-8, 9, (5, 400)).bfloat16().to(gpu), ops.groups_per_split(packed)
    tiles = ops.choose_tiles(5, packed, x.dtype, ops.ONE_WIDTH)
    assert tiles.apart
    apart = ops.linear(x, packed, torch.float32)

    assert torch.equal(product_together(x, packed, 64, per_split), apart)
    assert torch.equal(product_together(x, packed, 128, per_split), apart)
    assert not torch.equal(product_together(x, packed, 64, 13), apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_of_any_numbers_does_not_depend_on_the_others(
    gpu: str, format_: WeightFormat, dtype: torch.dtype
) -> None:
    if gpu == "cpu":
        pytest.skip("the interpreter's products are NumPy's, which look at the other rows")
    packed = pack(make_quantized(format_, 320, 2048, 128), None, gpu)
    x = torch.randn(700, 2048).to(dtype).to(gpu)
    alone = torch.cat([ops.linear(row, packed) for row in x[:20].split(1)])
    for rows in (20, 64, 65, 300, 700):
        assert torch.equal(ops.linear(x[:rows], packed)[:20], alone)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(out_ptr, words_ptr, zeros_ptr, BLOCK_K: tl.constexpr, INT4: tl.constexpr):  # type: ignore[no-untyped-def]
    """The one tile of a weight of one group."""
    FORMAT: tl.constexpr = weight_tile.INT4 if INT4 else weight_tile.FP8
    block, place = weight_tile.places(128, BLOCK_K, FORMAT)
    words = tl.load(words_ptr + block * (BLOCK_K * (2 if INT4 else 4)) + place)
    row, k = tl.arange(0, 128), tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if INT4:
        tile = weight_tile.int4_tile(words, tl.load(zeros_ptr + row), dtype, 128, BLOCK_K)
    else:
        tile = weight_tile.fp8_tile(words, dtype, 128, BLOCK_K)
    tl.store(out_ptr + row[:, None] * BLOCK_K + k[None, :], tile)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("int4", [False, True])
def test_every_code_arrives_where_it_belongs(
    gpu: str, dtype: torch.dtype, group: int, int4: bool
) -> None:
    codes = torch.randint(16 if int4 else 256, (128, group), dtype=torch.uint8)
    if not int4:
        codes.flatten()[:256] = torch.arange(256)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    zeros = torch.randint(16, (128,), dtype=torch.int32)
    out = torch.zeros(128, group, dtype=dtype, device=gpu)
    words = weight_tile.pack_codes(codes, group, int4=int4)
    _tile_kernel[(1,)](out, words.to(gpu), zeros.to(gpu), BLOCK_K=group, INT4=int4)
    values = codes.float() - zeros[:, None] if int4 else codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(out.cpu().float(), values)


@pytest.mark.parametrize(("format_", "bytes_each"), [("FP8", 1.0), ("INT4", 0.5)])
def test_codes_stay_packed(format_: str, bytes_each: float) -> None:
    packed = ops.pack_quantized(make_quantized(WeightFormat[format_], 128, 256, 128))
    assert packed.data.nbytes == 128 * 256 * bytes_each
