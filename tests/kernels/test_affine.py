"""Affine weights, whose groups have a scale and a min: the products, and what joins weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.cases import (
    AFFINE,
    DTYPES,
    OF_15_BITS,
    assert_close,
    exact_weight,
    make_affine,
)
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, QuantizedWeight
from surestep_kernels.linear import FP16_HEADERS, WeightFormat, concatenate
from surestep_kernels.linear.triton import pack_quantized as pack_for_gpu
from torch import Tensor

SHAPES = [(1, 32), (7, 64), (33, 200), (100, 77), (300, 1536)]  # N, K


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", AFFINE)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_equals_the_exact_product(
    native: KernelSet,
    reference: KernelSet,
    format_: WeightFormat,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    group_size: int,
) -> None:
    weight, bias = make_affine(format_, columns, depth, group_size), torch.randn(columns)
    for rows in (1, 2, 3, 4, 6, 7, 12, 50):
        x = torch.randn(rows, depth).to(dtype)
        expected = x.double() @ exact_weight(weight).T + bias.double()
        for kernels in (native, reference):
            packed = kernels.pack_quantized(weight, bias)
            assert packed.format is format_
            actual = kernels.linear(x, packed, torch.float32)
            ratio = OF_15_BITS if dtype is torch.bfloat16 else None
            assert_close(actual, expected.float(), ratio=ratio)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("format_", AFFINE)
def test_every_code_is_decoded_exactly_in_every_place(
    native: KernelSet, format_: WeightFormat, rows: int
) -> None:
    made = make_affine(format_, 256, 32, 32)
    assert made.bits is not None
    codes = (torch.arange(256)[:, None] + torch.arange(32)) % (1 << made.bits)
    scale = 0.5 if format_ in FP16_HEADERS else 0.5 + 2.0**-15
    weight = replace(
        made,
        codes=codes.to(torch.uint8),
        scales=torch.full((256, 1), scale),
        mins=torch.full((256, 1), -3.0),
    )
    packed = native.pack_quantized(weight)
    assert packed.format is format_
    x = torch.eye(32).repeat(-(-rows // 32), 1)
    out = torch.cat([native.linear(part.contiguous(), packed) for part in x.split(rows)])
    # Products are exact, then there is one rounding.
    expected = (codes.double() * scale - 3).float().T
    assert torch.equal(out, expected.repeat(len(x) // 32, 1))


@pytest.mark.parametrize("largest", [1.0, -1.9921875, 1e37, 1e-30])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 22), (torch.bfloat16, 14)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_small_inputs_count_beside_large_ones(
    native: KernelSet, bits: int, dtype: torch.dtype, kept: int, largest: float
) -> None:
    """With weights of 1 and 0, inputs of bf16 in either type, `kept` bits of the largest."""
    size = 32
    weight = QuantizedWeight(
        torch.eye(size, dtype=torch.uint8),
        torch.ones(size, 1),
        None,
        size,
        torch.zeros(size, 1),
        bits,
    )
    for smallest, exact in ((kept - 8, True), (40, False)):
        x = (torch.rand(9, size) + 1) * 2.0 ** -torch.randint(1, smallest, (9, size)) * largest
        x[:, 3] = largest
        x = x.bfloat16().to(dtype)
        error = native.linear(x, native.pack_quantized(weight), torch.float32) - x.float()
        assert error.abs().max() <= (0 if exact else abs(largest) * 2.0**-kept)


def finite(numbers: Tensor) -> Tensor:
    return numbers[numbers.isfinite()].float()


def every_fp16() -> Tensor:
    return finite(torch.arange(1 << 16).to(torch.uint16).view(torch.float16))


def many_fp32() -> Tensor:
    """Of every exponent, subnormal numbers and zeros included."""
    bits = torch.arange(0, 1 << 32, (1 << 16) + 3)
    return finite(bits.to(torch.uint32).view(torch.float32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numbers", [every_fp16, many_fp32])
def test_every_scale_and_min_is_kept_exactly(
    native: KernelSet, numbers: Callable[[], Tensor], bits: int
) -> None:
    column = numbers()[:, None]
    nothing = torch.zeros_like(column)
    x = torch.zeros(1, 16)
    x[0, 5] = 1
    for code, scales, mins in ((1, column, nothing), (0, nothing, column), (0, column, column)):
        codes = torch.full((len(column), 16), code, dtype=torch.uint8)
        weight = QuantizedWeight(codes, scales.contiguous(), None, 16, mins, bits)
        packed = native.pack_quantized(weight)
        assert (packed.format in FP16_HEADERS) == (numbers is every_fp16)
        assert torch.equal(native.linear(x, packed)[0], column[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_", AFFINE)
@pytest.mark.parametrize(("columns", "depth"), [(7, 32), (100, 77), (576, 1536)])
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, format_: WeightFormat, columns: int, depth: int, dtype: torch.dtype
) -> None:
    packed = native.pack_quantized(make_affine(format_, columns, depth, 32), torch.randn(columns))
    x = torch.randn(400, depth).to(dtype)  # more rows than one cache block takes
    native.set_num_threads(2)
    together = native.linear(x, packed)
    for rows in [*range(1, 20), *torch.randint(20, 300, (5,)).tolist()]:
        native.set_num_threads(1 + rows % 3)
        chosen = torch.randperm(400)[:rows]
        assert torch.equal(native.linear(x[chosen], packed), together[chosen])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format_", AFFINE)
def test_no_number_stays_in_its_row(
    native: KernelSet, format_: WeightFormat, number: float
) -> None:
    x = torch.randn(5, 64)
    x[2, 63] = number
    out = native.linear(x, native.pack_quantized(make_affine(format_, 50, 64, 32)))
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("format_", "bits_each"),
    [("AFFINE4", 5.0), ("AFFINE8", 9.0), ("AFFINE4_F32", 6.0), ("AFFINE8_F32", 10.0)],
)
def test_a_packed_weight_is_small(native: KernelSet, format_: str, bits_each: float) -> None:
    weight = make_affine(WeightFormat[format_], 320, 1024, 32)
    packed = native.pack_quantized(weight)
    assert packed.data.nbytes == weight.nbytes == int(320 * 1024 * bits_each / 8)


@pytest.mark.parametrize(("kind", "other"), [("AFFINE4", "AFFINE8_F32"), ("AFFINE8", "AFFINE4")])
def test_joined_weights_keep_their_numbers(kind: str, other: str) -> None:
    """In the wider codes and the smaller groups; the last group is short."""
    parts = [
        make_affine(WeightFormat[kind], 5, 72, 32),
        make_affine(WeightFormat[other], 3, 72, 16),
    ]
    whole = concatenate(parts)
    assert (whole.bits, whole.group_size) == (8, 16)
    assert torch.equal(exact_weight(whole), torch.cat([exact_weight(part) for part in parts]))
    assert concatenate(parts[:1]) is parts[0]
    order = torch.tensor([6, 0, 7])
    assert torch.equal(whole.rows(order).dequantize(), whole.dequantize()[order])


def test_of_4_bits_joined_they_stay_4_bits() -> None:
    parts = [make_affine(WeightFormat.AFFINE4, rows, 64, 32) for rows in (2, 3)]
    assert concatenate(parts).format is WeightFormat.AFFINE4


def test_experts_are_multiplied(native: KernelSet, reference: KernelSet) -> None:
    experts, hidden, inner, top = 4, 64, 96, 2
    up, down = (
        [make_affine(WeightFormat.AFFINE4_F32, *shape, 32) for _ in range(experts)]
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    x, weights = torch.randn(9, hidden), torch.rand(9, top)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(9)])
    plain, packed = torch.zeros(9, hidden), torch.zeros(9, hidden)
    affine = [[native.pack_quantized(w) for w in projection] for projection in (up, down)]
    native.moe(packed, x, weights, chosen, native.pack_experts(affine[0], affine[1], 0))
    dense = [
        [reference.pack_linear(w.dequantize()) for w in projection] for projection in (up, down)
    ]
    reference.moe(plain, x, weights, chosen, reference.pack_experts(dense[0], dense[1], 0))
    assert_close(packed, plain)


def test_the_gpu_kernels_refuse_them() -> None:
    weight = make_affine(WeightFormat.AFFINE4, 8, 64, 32)
    with pytest.raises(InvalidRequest, match="no GPU kernels"):
        pack_for_gpu(weight)


def test_a_weight_that_is_no_affine_is_our_mistake() -> None:
    made = make_affine(WeightFormat.AFFINE4, 4, 64, 32)
    assert made.mins is not None
    wrong: list[dict[str, Any]] = [
        {"bits": None},
        {"bits": 5},
        {"mins": None},
        {"codes": made.codes + 16},
        {"codes": made.codes.view(torch.float8_e4m3fn)},
        {"zeros": made.codes[:, :2].contiguous()},
        {"mins": made.mins[:, :1].contiguous()},
        {"mins": made.mins.double()},
        {"mins": made.mins / 0},
        {"scales": made.scales / 0},
        {"group_size": 64},
    ]
    for part in wrong:
        with pytest.raises(AssertionError):
            replace(made, **part)
