"""Weights in MXFP4: what they mean is what transformers makes of them; products in C and Triton."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from support.kernels import matrix_instructions
from support.kernels.cases import DTYPES, OF_15_BITS, assert_close, make_quantized, of_words
from support.kernels.together import product_together
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.linear import E8M0_NAN, MXFP4_GROUP, WeightFormat, dequantize, weight_tile
from surestep_kernels.linear import triton as ops
from surestep_kernels.linear.splits import sum_partials
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MXFP4 = WeightFormat.MXFP4


def every_number() -> QuantizedWeight:
    """Row n has scale n; both nibbles of a byte take all values."""
    codes = torch.arange(E8M0_NAN)[:, None] + torch.arange(MXFP4_GROUP)
    scales = torch.arange(E8M0_NAN).to(torch.uint8)[:, None].contiguous()
    return QuantizedWeight((codes % 16).to(torch.uint8), scales, None, MXFP4_GROUP)


def transformers_reads(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] as its dequantisation has it."""
    rows, columns = weight.codes.shape
    low, high = weight.codes.view(rows, columns // 32, 16, 2).unbind(3)
    blocks, scales = (low | high << 4)[None], weight.scales[None]
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T.contiguous()


def exact(weight: QuantizedWeight) -> Tensor:
    return transformers_reads(weight, torch.float64)


def pack(weight: QuantizedWeight, bias: Tensor | None, device: str) -> PackedLinear:
    """A weight that lies on a device, packed there."""
    moved = QuantizedWeight(weight.codes.to(device), weight.scales.to(device), None, MXFP4_GROUP)
    return ops.pack_quantized(moved, None if bias is None else bias.to(device))


def test_every_number_means_what_transformers_says() -> None:
    weight = every_number()
    meant = dequantize(weight.codes, weight.scales, None, MXFP4_GROUP)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        expected = transformers_reads(weight, dtype)
        assert torch.equal(meant.to(dtype).view(bits), expected.view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, MXFP4_GROUP])
def test_every_number_is_decoded_exactly(native: KernelSet, rows: int, dtype: torch.dtype) -> None:
    weight, every = every_number(), torch.eye(MXFP4_GROUP, dtype=dtype)
    packed, expected = native.pack_quantized(weight), transformers_reads(weight, torch.float32).T
    parts = every.split(rows)
    out = torch.cat([native.linear(x.contiguous(), packed, torch.float32) for x in parts])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernels", "columns", "depth", "row_counts"),
    [
        *(
            (name, *shape, (1, 2, 3, 4, 6, 7, 12, 50))
            for name in ("c", "reference")
            for shape in [(1, 32), (7, 64), (33, 96), (100, 352), (300, 1536)]
        ),
        *(("triton", *shape, (1, 19)) for shape in [(7, 32), (70, 96), (64, 128), (130, 352)]),
    ],
    indirect=["kernels"],
)
def test_equals_the_exact_product(
    kernels: KernelSet,
    columns: int,
    depth: int,
    row_counts: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    weight, bias = make_quantized(MXFP4, columns, depth, MXFP4_GROUP), torch.randn(columns)
    packed = kernels.pack_quantized(weight, bias)
    ratio = OF_15_BITS if of_words(kernels, MXFP4, dtype) else None
    for rows in row_counts:
        x = torch.randn(rows, depth).to(dtype)
        expected = (x.double() @ exact(weight).T + bias.double()).float()
        assert_close(kernels.linear(x, packed, torch.float32), expected, ratio=ratio)
        assert_close(kernels.linear(x, packed), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(7, 32), (100, 96), (960, 576), (576, 1536)])
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, columns: int, depth: int, dtype: torch.dtype
) -> None:
    weight = make_quantized(MXFP4, columns, depth, MXFP4_GROUP)
    packed = native.pack_quantized(weight, torch.randn(columns))
    x = torch.randn(400, depth).to(dtype)  # more rows than one cache block takes
    native.set_num_threads(2)
    together = native.linear(x, packed)
    for rows in [*range(1, 20), *torch.randint(20, 300, (10,)).tolist()]:
        native.set_num_threads(1 + rows % 3)
        chosen = torch.randperm(400)[:rows]
        assert torch.equal(native.linear(x[chosen], packed), together[chosen])


def test_a_nan_stays_in_its_row(column: KernelSet) -> None:
    x = torch.randn(5, 64)
    x[2, 63] = torch.nan
    out = column.linear(x, column.pack_quantized(make_quantized(MXFP4, 50, 64, MXFP4_GROUP)))
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_a_packed_weight_has_4_25_bits_an_element(native: KernelSet) -> None:
    weight = make_quantized(MXFP4, 320, 1024, MXFP4_GROUP)
    made, triton_made = native.pack_quantized(weight), ops.pack_quantized(weight)
    assert triton_made.scales is not None
    least = 320 * 1024 * 17 // 32
    assert made.data.nbytes == weight.nbytes == least
    padding = 64 * 1024 // 2  # of Triton's: to 384 rows
    assert triton_made.data.nbytes + triton_made.scales.nbytes == least + padding


@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(out_ptr, words_ptr, exponents_ptr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The one tile of a weight of one step."""
    block, place = weight_tile.places(128, STEP, weight_tile.MXFP4)
    words = tl.load(words_ptr + block * (STEP * 2) + place)
    row, k = tl.arange(0, 128), tl.arange(0, STEP)
    exponents = tl.load(exponents_ptr + row).to(tl.int32)
    tile = weight_tile.mxfp4_tile(words, exponents, out_ptr.dtype.element_ty, 128, STEP)
    tl.store(out_ptr + row[:, None] * STEP + k[None, :], tile)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy, as interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [0, 127])  # the least of 128 scales
def test_triton_reads_every_number_as_transformers_does(
    gpu: str, dtype: torch.dtype, first: int
) -> None:
    """Every code with every scale, in the first group of a step and in the second."""
    row, k = torch.arange(128)[:, None], torch.arange(weight_tile.MXFP4_STEP)
    codes = ((row + k) % 16).to(torch.uint8)
    scales = torch.cat((first + row, first + row.flip(0)), dim=1).to(torch.uint8)
    weight = QuantizedWeight(codes, scales, None, MXFP4_GROUP)
    packed = pack(weight, None, gpu)
    out = torch.zeros(128, weight_tile.MXFP4_STEP, dtype=dtype, device=gpu)
    _tile_kernel[(1,)](out, packed.data, packed.scales, STEP=weight_tile.MXFP4_STEP)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    meant = transformers_reads(weight, torch.bfloat16).to(dtype)
    assert torch.equal(out.cpu().view(bits), meant.view(bits))


def exact_sums(columns: int, depth: int) -> QuantizedWeight:
    """Sums that no order changes, if x is small whole numbers."""
    made = make_quantized(MXFP4, columns, depth, MXFP4_GROUP)
    return QuantizedWeight(made.codes, made.scales % 4 + 127, None, MXFP4_GROUP)


def test_a_row_in_triton_is_the_same_alone_and_in_company(gpu: str) -> None:
    """Whatever the width of an instruction."""
    packed = pack(exact_sums(40, 416), torch.randn(40), gpu)
    assert 1 < ops.groups_per_split(packed) < 7
    x = torch.randint(-8, 9, (9, 416)).bfloat16().to(gpu)
    expected = torch.cat([ops.linear(row, packed, torch.float32) for row in x.split(1)])
    for rows, widths in product((9, 40, 130), (ops.ONE_WIDTH, ops.ALL_WIDTHS)):
        many = x.repeat(-(-rows // 9), 1)[:rows]
        out = sum_partials(ops.quantized_partials(many, packed, torch.float32, widths))
        assert torch.equal(out, expected.repeat(-(-rows // 9), 1)[:rows])


def test_splits_in_triton_apart_and_together_have_equal_bits(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of both sizes; a mutant that adds all steps in one sum is seen."""
    if gpu == "cpu":
        matrix_instructions.install(monkeypatch)
    weight = make_quantized(MXFP4, 40, 416, MXFP4_GROUP)
    packed, x = pack(weight, torch.randn(40), gpu), torch.randn(5, 416).bfloat16().to(gpu)
    per_split = ops.groups_per_split(packed)
    tiles = ops.choose_tiles(5, packed, x.dtype, ops.ONE_WIDTH)
    assert tiles.apart
    apart = ops.linear(x, packed, torch.float32)

    assert torch.equal(product_together(x, packed, 64, per_split), apart)
    assert torch.equal(product_together(x, packed, 128, per_split), apart)
    assert not torch.equal(product_together(x, packed, 64, 7), apart)


def test_a_weight_that_is_no_mxfp4_is_our_mistake() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    for wrong in (
        (codes, scales, None, 16),
        (codes[:, :48].contiguous(), scales, None, MXFP4_GROUP),
        (codes, scales + E8M0_NAN, None, MXFP4_GROUP),
        (codes, scales, scales, MXFP4_GROUP),
    ):
        with pytest.raises(AssertionError):
            QuantizedWeight(*wrong)
