"""What stands before and behind routed experts: the bits are those of the ops one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.cases import make_quantized
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.dispatch import load_triton
from surestep_kernels.linear import WeightFormat
from surestep_kernels.moe import Mixture, Router
from surestep_kernels.triton import TritonKernels
from torch import Tensor

WIDTH, INNER, SHARED, EXPERTS, TOP_K = 640, 48, 300, 8, 3  # 640 inputs: 5 splits
MANY = 257  # rows, of which a product leaves no parts


def triton_ops() -> TritonKernels:
    kernels = load_triton()
    assert isinstance(kernels, TritonKernels)
    return kernels


def drawn(gpu: str, rows: int, columns: int) -> Tensor:
    made: Tensor = torch.randn(rows, columns) / columns**0.5
    return made.bfloat16().to(gpu)


def packed(gpu: str, outputs: int, inputs: int) -> PackedLinear:
    return triton_ops().pack_linear(drawn(gpu, outputs, inputs))


def quantised(gpu: str, outputs: int, inputs: int) -> PackedLinear:
    made = triton_ops().pack_quantized(make_quantized(WeightFormat.FP8, outputs, inputs, 32))
    assert made.scales is not None
    return replace(made, data=made.data.to(gpu), scales=made.scales.to(gpu))


def make_router(gpu: str, *, apart: bool, normalize: bool = True) -> Router:
    scores = packed(gpu, EXPERTS + (not apart), WIDTH)
    return Router(scores, packed(gpu, 1, WIDTH) if apart else None, TOP_K, normalize)


@pytest.mark.parametrize(
    ("rows", "apart", "normalize"),
    [(0, False, True), (1, False, True), (9, False, False), (9, True, True), (MANY, False, True)],
)
def test_routing_and_the_shared_expert(gpu: str, rows: int, apart: bool, normalize: bool) -> None:
    kernels, x = triton_ops(), drawn(gpu, rows, WIDTH)
    router = make_router(gpu, apart=apart, normalize=normalize)
    gate_up = packed(gpu, 2 * SHARED, WIDTH)
    made = kernels.route_tokens(x, router, gate_up)
    single = KernelSet.route_tokens(kernels, x, router, gate_up)
    assert tensors(made)[3].shape == (rows, 1)
    for ours, theirs in zip(tensors(made), tensors(single), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    if rows:
        alone = kernels.route_tokens(x[-1:], router, gate_up)
        assert_same_experts(gpu, alone, made)


def tensors(mixture: Mixture) -> list[Tensor]:
    """All of a layer with a shared expert."""
    found = [tensor for tensor in mixture if tensor is not None]
    assert len(found) == len(mixture)
    return found


def assert_same_experts(gpu: str, alone: Mixture, together: Mixture) -> None:
    """Of the last row. In the interpreter NumPy multiplies, which rounds rows differently."""
    assert torch.equal(alone.experts[0], together.experts[-1])
    if gpu == "cuda":
        pairs = zip(tensors(alone), tensors(together), strict=True)
        assert all(torch.equal(a[0], b[-1]) for a, b in pairs)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (0, "plain"),
        (1, "plain"),
        (9, "plain"),
        (MANY, "plain"),
        (4, "one by one"),
        (4, "w8a8"),
        (9, "of another rank"),
    ],
)
def test_experts_and_the_residual(gpu: str, rows: int, kind: str) -> None:
    kernels = load_triton(activation_dtype="fp8") if kind == "w8a8" else triton_ops()
    gate_up = [packed(gpu, 2 * INNER, WIDTH) for _ in range(EXPERTS)]
    down = [packed(gpu, WIDTH, INNER) for _ in range(EXPERTS)]
    if kind == "w8a8":
        gate_up = [quantised(gpu, 2 * INNER, WIDTH) for _ in gate_up]
    first = 2 if kind == "of another rank" else 0
    experts = kernels.pack_experts(gate_up, down, first)
    if kind == "one by one":
        experts = replace(experts, addresses=None)
    shared_down, weight = packed(gpu, WIDTH, SHARED), torch.rand(WIDTH, device=gpu)
    x = drawn(gpu, rows, WIDTH)
    router = make_router(gpu, apart=False)
    mixture = kernels.route_tokens(x, router, packed(gpu, 2 * SHARED, WIDTH))
    residual = drawn(gpu, rows, WIDTH)
    before, same = residual.clone(), residual.clone()
    out = kernels.mix_experts_add_rms_norm(mixture, experts, shared_down, residual, weight, 1e-5)
    expected = KernelSet.mix_experts_add_rms_norm(
        kernels, mixture, experts, shared_down, same, weight, 1e-5
    )
    if gpu == "cpu":  # the compiler may fuse a product and a sum of one kernel, not of another
        assert torch.equal(residual, same)
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    assert rows == 0 or not torch.equal(residual, before)


def test_an_expert_takes_part_and_so_does_the_gate(gpu: str) -> None:
    """Or the equalities above would hold of anything that is left out on both sides."""
    kernels, x = triton_ops(), drawn(gpu, 3, WIDTH)
    gate_up = [packed(gpu, 2 * INNER, WIDTH) for _ in range(EXPERTS)]
    down = [packed(gpu, WIDTH, INNER) for _ in range(EXPERTS)]
    experts, shared_down = kernels.pack_experts(gate_up, down, 0), packed(gpu, WIDTH, SHARED)
    mixture = kernels.route_tokens(x, make_router(gpu, apart=False), packed(gpu, 2 * SHARED, WIDTH))

    def run(of: Mixture) -> Tensor:
        residual, weight = torch.zeros_like(x), torch.ones(WIDTH, device=gpu)
        kernels.mix_experts_add_rms_norm(of, experts, shared_down, residual, weight, 1e-5)
        return residual

    whole = run(mixture)
    other = (mixture.experts + 1) % EXPERTS
    *_, gate, shared = tensors(mixture)
    for changed in (
        mixture._replace(experts=other),
        mixture._replace(weights=mixture.weights * 2),
        mixture._replace(gate=gate + 1),
        mixture._replace(shared=shared * 2),
    ):
        assert not torch.equal(run(changed), whole)
