"""Products with what follows them in one launch: the bits are those of the ops one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.kernels.cases import interpreted_in_turn
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.dispatch import load_triton
from surestep_kernels.gelu_and_mul.triton import gelu_and_mul, gelu_and_mul_of_partials
from surestep_kernels.linear.splits import PartialSums, sum_partials
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.project_heads.triton import project_heads_of_partials
from surestep_kernels.rms_norm.triton import add_rms_norm_of_partials, rms_norm
from surestep_kernels.rotary.triton import rotary
from surestep_kernels.silu_and_mul.triton import silu_and_mul, silu_and_mul_of_partials
from surestep_kernels.store_kv import FP8, LayerCache
from surestep_kernels.store_kv.triton import store_kv
from surestep_kernels.triton import TritonKernels
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_SIZE, BLOCKS, POSITIONS, INPUTS = 8, 40, 50, 640  # inputs: 10 steps, so 5 splits


def make_parts(
    device: str, splits: int, rows: int, columns: int, dtype: torch.dtype, *, bias: bool
) -> PartialSums:
    sums = torch.randn(splits, rows, columns, device=device)
    return PartialSums(sums, torch.randn(columns, device=device).to(dtype) if bias else None, dtype)


def one_by_one(parts: PartialSums) -> Tensor:
    """In the order of splits, then the bias, rounded once."""
    total = torch.zeros_like(parts.sums[0])
    for part in parts.sums:
        total = total + part
    if parts.bias is not None:
        total = total + parts.bias.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("splits", "rows", "columns"), [(1, 1, 7), (2, 3, 130), (16, 2, 300)])
def test_sums_and_gates(
    gpu: str, splits: int, rows: int, columns: int, bias: bool, dtype: torch.dtype
) -> None:
    parts = make_parts(gpu, splits, rows, 2 * columns, dtype, bias=bias)
    y = one_by_one(parts)
    assert torch.equal(sum_partials(parts), y)
    assert torch.equal(silu_and_mul_of_partials(parts), silu_and_mul(y))
    assert torch.equal(gelu_and_mul_of_partials(parts), gelu_and_mul(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("splits", "rows", "width"), [(1, 1, 6), (2, 60, 40), (16, 3, 2048), (3, 2, 2560)]
)
def test_the_residual_and_its_norm(
    gpu: str, splits: int, rows: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    parts = make_parts(gpu, splits, rows, width, dtype, bias=bias)
    residual = torch.randn(rows, width, device=gpu).to(dtype)
    weight, same = torch.rand(width, device=gpu), residual.clone()
    expected = residual + one_by_one(parts)
    out = add_rms_norm_of_partials(parts, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    # However many parts it came in.
    whole = PartialSums.whole(one_by_one(parts))
    assert torch.equal(out, add_rms_norm_of_partials(whole, same, weight, 1e-5))
    if gpu == "cpu":  # a norm by itself has fewer threads
        assert torch.equal(out, rms_norm(expected, weight, 1e-5))


class Heads(NamedTuple):
    """Of a projection."""

    q: int
    others: int
    kv: int
    head_dim: int
    rotated: int


SIZES = (
    Heads(9, 0, 3, 64, 64),
    Heads(4, 4, 2, 24, 10),  # no power of two; a part of each head turns
    Heads(1, 0, 1, 256, 64),
    Heads(2, 3, 2, 6, 6),
)


def make_projection(packed: PackedLinear, heads: Heads, *, norms: bool) -> HeadProjection:
    device = packed.data.device
    angles = torch.randn(POSITIONS, heads.rotated // 2, device=device)
    q_norm, k_norm = torch.rand(2, heads.head_dim, device=device) + 0.5
    return HeadProjection(
        packed=packed,
        head_dim=heads.head_dim,
        num_heads=heads.q,
        num_others=heads.others,
        num_kv_heads=heads.kv,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        q_norm=q_norm if norms else None,
        k_norm=k_norm if norms else None,
        eps=1e-6,
    )


def make_cache(
    device: str, heads: Heads, dtype: torch.dtype, *, scales: bool = False
) -> LayerCache:
    shape = BLOCKS, heads.kv, BLOCK_SIZE, heads.head_dim
    keys, values = (torch.zeros(shape, device=device).to(dtype) for _ in "kv")
    return LayerCache(keys, values, torch.tensor([0.5, 3.0], device=device) if scales else None)


def outputs(heads: Heads) -> int:
    return (heads.q + heads.others + 2 * heads.kv) * heads.head_dim


def triton_ops() -> TritonKernels:
    kernels = load_triton()
    assert isinstance(kernels, TritonKernels)
    return replace(kernels, store_kv=store_kv)


def places(device: str, rows: int) -> tuple[Tensor, Tensor]:
    """Positions, and slots of which one does not exist."""
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:rows]
    slots[rows // 2] = -1
    return torch.randint(POSITIONS, (rows,)).to(device), slots.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", SIZES, ids=str)
@pytest.mark.parametrize(("splits", "rows"), [(1, 3), (7, 5)])
@interpreted_in_turn
def test_heads_of_partials(
    gpu: str, heads: Heads, splits: int, rows: int, norms: bool, dtype: torch.dtype
) -> None:
    """As sum, norm, rotation and store, each in a kernel of its own."""
    weight = torch.empty(outputs(heads), 1, device=gpu)
    parts = make_parts(gpu, splits, rows, outputs(heads), dtype, bias=True)
    projection = make_projection(triton_ops().pack_linear(weight), heads, norms=norms)
    (positions, slots), y = places(gpu, rows), one_by_one(parts)
    expected, actual = (make_cache(gpu, heads, dtype) for _ in range(2))
    made = y.view(rows, -1, heads.head_dim).clone()
    q, others, k, v = made.split(projection.sizes, dim=1)
    if projection.q_norm is not None and projection.k_norm is not None:
        q, k = rms_norm(q, projection.q_norm, 1e-6), rms_norm(k, projection.k_norm, 1e-6)
    rotary(q, k, positions, projection.cos_sin)
    store_kv(k, v, expected, slots)
    for came in (parts, PartialSums.whole(y)):
        result = project_heads_of_partials(came, projection, positions, actual, slots)
        if gpu == "cpu":  # the compiler may fuse a product and a sum of one kernel, not of another
            assert torch.equal(result[0], q)
            assert torch.equal(actual.k, expected.k)
        assert torch.equal(result[1], others)
        assert torch.equal(actual.v, expected.v)


@pytest.mark.parametrize("scales", [False, True])
def test_heads_in_fp8_pages(gpu: str, scales: bool) -> None:
    heads = SIZES[0]
    kernels, x = triton_ops(), torch.randn(6, INPUTS, device=gpu).bfloat16()
    packed = kernels.pack_linear(torch.randn(outputs(heads), INPUTS, device=gpu).bfloat16())
    projection, where = make_projection(packed, heads, norms=False), places(gpu, 6)
    expected, actual = (make_cache(gpu, heads, FP8, scales=scales) for _ in range(2))
    KernelSet.project_heads(kernels, x, projection, where[0], expected, where[1])
    kernels.project_heads(x, projection, where[0], actual, where[1])
    for ours, theirs in zip(actual.pages, expected.pages, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert ours.float().any()


def make_packed(kind: str, kernels: KernelSet, columns: int, device: str) -> PackedLinear:
    """With a bias."""
    bias = torch.randn(columns, device=device).bfloat16()
    if kind == "bf16":
        weight = torch.randn(columns, INPUTS, device=device).bfloat16()
        return kernels.pack_linear(weight, bias)
    codes = torch.randn(columns, INPUTS, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(columns, INPUTS // 32, device=device)
    return kernels.pack_quantized(QuantizedWeight(codes, scales, None, 32), bias)


@pytest.mark.parametrize(
    ("kind", "rows"),  # from 257 on a product of bf16 leaves no parts
    [*(("bf16", rows) for rows in (0, 1, 17, 257)), *(("fp8", rows) for rows in (0, 1, 17))],
)
@interpreted_in_turn
def test_whole_layers(gpu: str, kind: str, rows: int) -> None:
    """The ops of a model, each beside what a KernelSet makes of its single ops."""
    kernels, heads = triton_ops(), SIZES[1]
    x = torch.randn(rows, INPUTS, device=gpu).bfloat16()
    gate_up = make_packed(kind, kernels, 2 * 70, gpu)
    activated = kernels.linear_silu_and_mul(x, gate_up)
    assert torch.equal(activated, KernelSet.linear_silu_and_mul(kernels, x, gate_up))
    activated = kernels.linear_gelu_and_mul(x, gate_up)
    assert torch.equal(activated, KernelSet.linear_gelu_and_mul(kernels, x, gate_up))
    down, weight = make_packed(kind, kernels, 90, gpu), torch.rand(90, device=gpu)
    residual = torch.randn(rows, 90, device=gpu).bfloat16()
    same = residual.clone()
    normed = kernels.linear_add_rms_norm(x, down, residual, weight, 1e-5)
    expected = KernelSet.linear_add_rms_norm(kernels, x, down, same, weight, 1e-5)
    assert torch.equal(normed, expected)
    assert torch.equal(residual, same)
    qkv = make_packed(kind, kernels, outputs(heads), gpu)
    projection = make_projection(qkv, heads, norms=True)
    positions, slots = places(gpu, rows) if rows else (torch.zeros(0, dtype=torch.int64),) * 2
    caches = [make_cache(gpu, heads, torch.bfloat16) for _ in range(2)]
    made = kernels.project_heads(x, projection, positions, caches[0], slots)
    single = KernelSet.project_heads(kernels, x, projection, positions, caches[1], slots)
    if gpu == "cpu":
        assert torch.equal(made[0], single[0])
        assert torch.equal(caches[0].k, caches[1].k)
    assert torch.equal(made[1], single[1])
    assert torch.equal(caches[0].v, caches[1].v)


def test_a_product_leaves_parts_where_rows_are_few() -> None:
    """Or the tests above would test nothing."""
    kernels = triton_ops()
    packed = make_packed("bf16", kernels, 90, "cpu")
    parts = [kernels.linear_partials(torch.zeros(m, INPUTS).bfloat16(), packed) for m in (1, 300)]
    assert [len(of.sums) for of in parts] == [5, 1]
    assert [of.is_final for of in parts] == [False, True]


def test_other_stores_of_keys_are_not_passed_over(gpu: str) -> None:
    """What an attention backend reads, it has written."""
    heads, stored = SIZES[3], list[Tensor]()
    kernels = replace(triton_ops(), store_kv=lambda k, v, cache, slots: stored.append(k))
    projection = make_projection(
        make_packed("bf16", kernels, outputs(heads), gpu), heads, norms=False
    )
    cache, (positions, slots) = make_cache(gpu, heads, torch.bfloat16), places(gpu, 3)
    kernels.project_heads(
        torch.ones(3, INPUTS, device=gpu).bfloat16(), projection, positions, cache, slots
    )
    assert [k.shape for k in stored] == [(3, heads.kv, heads.head_dim)]
    assert not cache.k.any()
