"""Activations in FP8: what they mean, the kernel that makes them, and products with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, make_quantized
from surestep_kernels import KernelSet, PackedLinear, load_kernels
from surestep_kernels.linear import (
    Linear,
    QuantizedWeight,
    WeightFormat,
    linear_reference,
    quantize_rows,
    round_rows,
    with_rounded_rows,
)
from surestep_kernels.linear import triton as linear_ops
from surestep_kernels.linear import triton_fp8_rows as ops
from surestep_kernels.linear.weight_tile import FP8_ORDER, padded_group
from torch import Tensor

DEPTH, GROUP = 200, 48  # the last group holds 8
# Tensor cores of Hopper add products of FP8 in numbers of fewer bits; 1e-3 of the mean was seen.
ACCUMULATED = {"cuda": 5e-4}


def pack(weight: QuantizedWeight, gpu: str, bias: Tensor | None = None) -> PackedLinear:
    """As the device has it."""
    packed = linear_ops.pack_quantized(weight, bias)
    parts = {name: getattr(packed, name) for name in ("data", "bias", "scales")}
    return replace(packed, **{name: p.to(gpu) for name, p in parts.items() if p is not None})


def with_fp8_rows() -> Linear:
    """The device's product."""
    return partial(linear_ops.linear, fp8_rows=True)


def rows(count: int, dtype: torch.dtype) -> Tensor:
    """Of sizes from 2^-130 to 2^120, and one of zeros."""
    x = torch.randn(count, DEPTH) * 2.0 ** torch.randint(-20, 20, (count, DEPTH))
    x *= 2.0 ** torch.linspace(-110, 100, count)[:, None]
    x[count // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_are_the_least_powers_of_two_that_fit(dtype: torch.dtype) -> None:
    x = rows(9, dtype)
    codes, scales = quantize_rows(x, GROUP)
    assert torch.equal(scales.frexp().mantissa, torch.full(scales.shape, 0.5))
    assert torch.equal(scales.isfinite(), torch.ones_like(scales, dtype=torch.bool))
    for k in range(0, DEPTH, GROUP):
        largest, scale = x[:, k : k + GROUP].float().abs().amax(1), scales[:, k // GROUP]
        assert (largest <= 448 * scale).all()
        least = scale == 2.0**-126
        assert ((largest > 224 * scale) | least).all()
    assert codes.float().isfinite().all()


def test_a_scaled_row_is_the_same_row_scaled() -> None:
    x = torch.randn(3, DEPTH)
    assert torch.equal(round_rows(x * 1024, GROUP), round_rows(x, GROUP) * 1024)
    error = (round_rows(x, GROUP) - x).abs()
    assert (error <= x.abs() / 16 + 2.0**-16).all()


def test_what_is_rounded_stays_in_its_dtype_and_rounds_once() -> None:
    x = torch.randn(3, DEPTH).bfloat16()
    once = round_rows(x, GROUP)
    assert torch.equal(once.float(), round_rows(x.float(), GROUP))
    assert torch.equal(round_rows(once, GROUP), once)
    assert not torch.equal(once, x)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_in_its_row_alone(gpu: str, bad: float) -> None:
    x = torch.randn(3, DEPTH)
    x[1, 70] = bad
    assert round_rows(x, GROUP)[1, 70].isnan()
    y = with_fp8_rows()(x.to(gpu), pack(make_quantized(WeightFormat.FP8, 9, DEPTH, GROUP), gpu))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [48, 128])
def test_the_kernel_equals_the_reference(gpu: str, dtype: torch.dtype, group: int) -> None:
    x = rows(9, dtype)
    made, (codes, scales) = ops.quantize_rows(x.to(gpu), group), quantize_rows(x, group)
    assert made.scales is not None
    assert torch.equal(made.scales.cpu(), scales.T)
    padded = made.codes.cpu().view(9, -1, padded_group(group) // 16, 16).float()
    natural = torch.empty_like(padded)
    natural[..., list(FP8_ORDER)] = padded
    natural = natural.flatten(2)
    assert not natural[:, :, group:].any()
    assert torch.equal(natural[:, :, :group].flatten(1)[:, :DEPTH], codes.float())


def test_a_row_is_rounded_alike_alone_and_in_company(gpu: str) -> None:
    """Though others are 2^200 times as large: a scale that they shared would leave nothing of it."""
    x = rows(9, torch.float32)
    expected, together = round_rows(x, GROUP), ops.quantize_rows(x.to(gpu), GROUP)
    assert together.scales is not None
    for i, row in enumerate(x.split(1)):
        assert torch.equal(round_rows(row, GROUP)[0], expected[i])
        alone = ops.quantize_rows(row.to(gpu), GROUP)
        assert alone.scales is not None
        assert torch.equal(alone.codes[0].view(torch.uint8), together.codes[i].view(torch.uint8))
        assert torch.equal(alone.scales[:, 0], together.scales[:, i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 8, 8), (70, 100, 24), (130, 320, 128)])
def test_products_equal_the_reference(
    gpu: str, reference: KernelSet, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    weight = make_quantized(WeightFormat.FP8, *shape)
    product, expected = with_fp8_rows(), with_rounded_rows(reference.linear)
    for count, bias in ((1, None), (19, torch.randn(shape[0]).to(dtype))):
        x = torch.randn(count, shape[1]).to(dtype)
        packed = pack(weight, gpu, bias)
        wanted = expected(x, reference.pack_quantized(weight, bias), torch.float32)
        made = product(x.to(gpu), packed, torch.float32).cpu()
        assert_close(made, wanted, ratio=ACCUMULATED.get(gpu))
        ratio = ACCUMULATED.get(gpu) if dtype is torch.float32 else None
        assert_close(product(x.to(gpu), packed).cpu(), wanted.to(dtype), ratio=ratio)


def test_a_row_is_the_same_alone_and_in_company(gpu: str) -> None:
    """Sums of a group are exact, those of groups are not."""
    codes = torch.randint(-4, 5, (40, 256)).float().to(torch.float8_e4m3fn)
    scales = torch.rand(40, 8)
    packed = pack(QuantizedWeight(codes, scales, None, 32), gpu)
    x = torch.randint(-8, 9, (9, 256)) * 2.0 ** torch.arange(9)[:, None]
    x = x.bfloat16().to(gpu)
    product = with_fp8_rows()
    alone = torch.cat([product(row, packed, torch.float32) for row in x.split(1)])
    many = x.repeat(8, 1)
    assert torch.equal(product(many, packed, torch.float32), alone.repeat(8, 1))


def test_only_fp8_weights_round() -> None:
    x = torch.randn(3, 64)
    kernels = load_kernels("cpu", "reference", activation_dtype="fp8")
    plain = kernels.pack_linear(torch.randn(8, 64))
    assert torch.equal(kernels.linear(x, plain), linear_reference(x, plain))
    for format_ in (WeightFormat.INT4, WeightFormat.FP8):
        packed = kernels.pack_quantized(make_quantized(format_, 8, 64, 32))
        equal = torch.equal(kernels.linear(x, packed), linear_reference(x, packed))
        assert equal == (format_ is WeightFormat.INT4)


def test_the_c_kernels_mean_the_same() -> None:
    x, weight = torch.randn(3, 64), make_quantized(WeightFormat.FP8, 8, 64, 32)
    results = []
    for which in ("auto", "reference"):
        kernels = load_kernels("cpu", which, activation_dtype="fp8")
        results.append(kernels.linear(x, kernels.pack_quantized(weight)))
    assert_close(*results)
