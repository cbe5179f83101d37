"""Experts with biases and the clamped activation, plain and in MXFP4, and without a shared one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, make_quantized
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.dispatch import load_triton
from surestep_kernels.linear import WeightFormat, dequantize
from surestep_kernels.moe import PackedExperts, Router
from torch import Tensor

WIDTH, INNER, EXPERTS, TOP_K, LIMIT = 96, 64, 5, 3, 1.5


class Weights:
    """Of experts; biases are as large as what they are added to."""

    def __init__(self, dtype: torch.dtype) -> None:
        sizes = (2 * INNER, WIDTH), (WIDTH, INNER)
        self.biases = [[torch.randn(n).to(dtype) for _ in range(EXPERTS)] for n, _ in sizes]
        self.quantised = [
            [make_quantized(WeightFormat.MXFP4, *size, 32) for _ in range(EXPERTS)]
            for size in sizes
        ]
        self.dtype = dtype

    def packed(
        self, kernels: KernelSet, device: str, *, mxfp4: bool, first: int = 0
    ) -> PackedExperts:
        """In MXFP4, or plain weights that mean the same."""

        def pack(weight: QuantizedWeight, bias: Tensor) -> PackedLinear:
            if mxfp4:
                codes, scales = weight.codes.to(device), weight.scales.to(device)
                placed = QuantizedWeight(codes, scales, None, 32)
                return kernels.pack_quantized(placed, bias.to(device))
            plain = dequantize(weight.codes, weight.scales, None, 32).to(self.dtype)
            return kernels.pack_linear(plain.to(device), bias.to(device))

        gate_up, down = (
            [pack(*one) for one in zip(*of, strict=True)]
            for of in zip(self.quantised, self.biases, strict=True)
        )
        return kernels.pack_experts(gate_up, down, first, LIMIT)


def choose(tokens: int, among: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Weights f32[T, k] and experts i64[T, k] in no order."""
    experts = torch.stack([torch.randperm(among)[:TOP_K] for _ in range(tokens)])
    return torch.rand(tokens, TOP_K), experts


def run(kernels: KernelSet, device: str, packed: PackedExperts, *inputs: Tensor) -> Tensor:
    x, weights, experts = (part.to(device) for part in inputs)
    total = torch.zeros(len(x), WIDTH, device=device)
    kernels.moe(total, x, weights, experts, packed)
    return total.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mxfp4", [False, True], ids=["plain", "mxfp4"])
@pytest.mark.parametrize("first", [0, 4])
def test_equals_the_reference(
    gpu: str, reference: KernelSet, dtype: torch.dtype, mxfp4: bool, first: int
) -> None:
    """With experts of other ranks, too."""
    weights, kernels = Weights(dtype), load_triton()
    inputs = torch.randn(7, WIDTH).to(dtype), *choose(7, among=EXPERTS + 2 * first)
    packed = weights.packed(kernels, gpu, mxfp4=mxfp4, first=first)
    assert packed.addresses is not None
    expected = run(
        reference, "cpu", weights.packed(reference, "cpu", mxfp4=mxfp4, first=first), *inputs
    )
    assert_close(run(kernels, gpu, packed, *inputs).to(dtype), expected.to(dtype))


@pytest.mark.parametrize("mxfp4", [False, True], ids=["plain", "mxfp4"])
def test_one_by_one_they_make_the_same(gpu: str, mxfp4: bool) -> None:
    kernels = load_triton()
    packed = Weights(torch.bfloat16).packed(kernels, gpu, mxfp4=mxfp4)
    inputs = torch.randn(4, WIDTH).bfloat16(), *choose(4)
    apart = run(kernels, gpu, replace(packed, addresses=None), *inputs)
    assert_close(apart.bfloat16(), run(kernels, gpu, packed, *inputs).bfloat16())


@pytest.mark.parametrize("tokens", [1, 70])
def test_bits_are_those_of_plain_weights_that_mean_the_same(gpu: str, tokens: int) -> None:
    """Same instructions, same operands."""
    weights, kernels = Weights(torch.bfloat16), load_triton()
    inputs = torch.randn(tokens, WIDTH).bfloat16(), *choose(tokens)
    made = [
        run(kernels, gpu, weights.packed(kernels, gpu, mxfp4=mxfp4), *inputs)
        for mxfp4 in (False, True)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("change", ["biases", "limit"])
def test_biases_and_the_limit_take_part(gpu: str, change: str) -> None:
    """Or the equalities above would hold of what is left out on both sides."""
    kernels = load_triton()
    packed = Weights(torch.bfloat16).packed(kernels, gpu, mxfp4=True)
    inputs = torch.randn(3, WIDTH).bfloat16(), *choose(3)
    whole = run(kernels, gpu, packed, *inputs)
    other = replace(packed, swiglu_limit=None)
    if change == "biases":
        for linear in packed.gate_up:
            assert linear.bias is not None
            linear.bias.zero_()
        other = packed
    assert not torch.equal(run(kernels, gpu, other, *inputs), whole)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_layer_without_a_shared_expert(gpu: str, rows: int) -> None:
    """The bits are those of the ops one by one."""
    kernels = load_triton()
    scores = kernels.pack_linear(*(drawn(gpu, EXPERTS, WIDTH), drawn(gpu, EXPERTS)))
    router = Router(scores, None, TOP_K, normalize=True)
    x, weight = drawn(gpu, rows, WIDTH), torch.rand(WIDTH, device=gpu)
    made = kernels.route_tokens(x, router, None)
    single = KernelSet.route_tokens(kernels, x, router, None)
    assert made.gate is made.shared is None
    assert torch.equal(made.experts, single.experts)
    assert torch.equal(made.weights, single.weights)
    unbiased = router._replace(scores=replace(scores, bias=None))
    assert rows == 0 or not torch.equal(
        kernels.route_tokens(x, unbiased, None).weights, made.weights
    )
    experts = Weights(torch.bfloat16).packed(kernels, gpu, mxfp4=True)
    residual = drawn(gpu, rows, WIDTH)
    same, before = residual.clone(), residual.clone()
    out = kernels.mix_experts_add_rms_norm(made, experts, None, residual, weight, 1e-5)
    expected = KernelSet.mix_experts_add_rms_norm(kernels, made, experts, None, same, weight, 1e-5)
    if gpu == "cpu":  # the compiler may fuse a product and a sum of one kernel, not of another
        assert torch.equal(residual, same)
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert rows == 0 or not torch.equal(residual, before)


def drawn(gpu: str, *shape: int) -> Tensor:
    made: Tensor = torch.randn(shape)
    return made.bfloat16().to(gpu)
