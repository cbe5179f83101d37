"""Launches of quantised products and of experts that the benchmarks leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from gpu.sizes import kernels
from gpu.weights import EXPERT_PACK
from support.kernels.compile_launch import BF16, META, Launch
from surestep_kernels import PackedLinear
from surestep_kernels.add_adapters import AdapterWeights
from surestep_kernels.linear import PackedHeads
from surestep_kernels.linear.triton import ALL_WIDTHS, ONE_WIDTH, quantized_partials
from surestep_kernels.moe import ExpertAdapters, PackedExperts, Router
from surestep_kernels.moe.products import multiply_heads
from surestep_kernels.moe.triton import moe


class _Experts(NamedTuple):
    """Of a launch of experts without memory: their addresses are never looked at."""

    tokens: int
    experts: int = 32
    top_k: int = 8
    hidden: int = 2048
    inner: int = 512


def quantised() -> Iterator[Launch]:
    """Instructions of all widths, FP8 rows, and experts with much to do."""
    for name, rows, widths in product(
        ("fp8", "int4", "mxfp4", "nvfp4", "fp8 rows"), (1, 20, 64, 4096), (ONE_WIDTH, ALL_WIDTHS)
    ):
        if rows in (1, 4096) or widths is ALL_WIDTHS:
            case = f"{name} M={rows} width of {len(widths)}"
            yield Launch("linear", case, partial(_multiply, name, rows, widths))
    for name, tokens in product(("bf16", "fp8", "int4", "mxfp4", "nvfp4", "fp8 rows"), (1, 1024)):
        for widths in (ONE_WIDTH, ALL_WIDTHS):
            case = f"experts {name} T={tokens} width of {len(widths)}"
            yield Launch("moe", case, partial(_run_experts, name, _Experts(tokens), widths))
            case = f"heads {name} T={tokens} width of {len(widths)}"
            yield Launch("moe", case, partial(_multiply_heads, name, tokens, widths))
    for name in ("bf16", "mxfp4"):
        run = partial(_run_experts, name, _Experts(64), ONE_WIDTH, adapted=True)
        yield Launch("moe", f"experts {name} with adapters", run)


def _pack(name: str, n: int, k: int) -> PackedLinear:
    """Weights of 4 bits need memory: packing looks at their scales."""
    return EXPERT_PACK[name.split()[0]]("cpu" if "4" in name else META, n, k)


def _multiply(name: str, rows: int, widths: tuple[int, ...]) -> None:
    packed = _pack(name, 1024, 2048)
    x = torch.empty(rows, 2048, dtype=BF16, device=META)
    quantized_partials(x, packed, None, widths, fp8_rows="rows" in name)


def _multiply_heads(name: str, tokens: int, widths: tuple[int, ...]) -> None:
    addresses = torch.empty(3, 8, dtype=torch.int64, device=META)
    heads = PackedHeads([_pack(name, 128, 512)] * 8, addresses)
    x = torch.empty(tokens, 8, 512, dtype=BF16, device=META)
    multiply_heads(x, heads, widths, fp8_rows="rows" in name)


def _run_experts(
    name: str, of: _Experts, widths: tuple[int, ...], *, adapted: bool = False
) -> None:
    """Those of gpt-oss have biases and an activation of their own."""
    gpt_oss = name == "mxfp4"
    packed = _experts(name, of, biased=gpt_oss, swiglu_limit=7.0 if gpt_oss else None)
    x = torch.empty(of.tokens, of.hidden, dtype=BF16, device=META)
    total, chosen = torch.empty(x.shape, device=META), (of.tokens, of.top_k)
    experts = torch.empty(chosen, dtype=torch.int64, device=META)
    weights = torch.empty(chosen, device=META)
    adapters = _adapters(of) if adapted else None
    moe(total, x, weights, experts, packed, widths, fp8_rows="rows" in name, adapters=adapters)


def _adapters(of: _Experts) -> ExpertAdapters:
    """Eight adapters of rank 16."""
    at, new = 8 * of.experts, partial(torch.empty, device=META)

    def weights(parts: int, outputs: int, inputs: int) -> AdapterWeights:
        a, b = new(at, parts, 16, inputs, dtype=BF16), new(at, 16, outputs, dtype=BF16)
        ranks, scales = new(at, parts, dtype=torch.int32), new(at, parts)
        return AdapterWeights(a, b, ranks, scales, new(parts, 3, dtype=torch.int64))

    gate_up, down = weights(2, 2 * of.inner, of.hidden), weights(1, of.hidden, of.inner)
    return ExpertAdapters(new(of.tokens, dtype=torch.int32), gate_up, down)


def _experts(
    name: str, of: _Experts, *, biased: bool = False, swiglu_limit: float | None = None
) -> PackedExperts:
    gate_up, down = _pack(name, 2 * of.inner, of.hidden), _pack(name, of.hidden, of.inner)
    if biased:
        gate_up, down = (
            replace(linear, bias=torch.empty(linear.out_features, dtype=BF16, device=META))
            for linear in (gate_up, down)
        )
    addresses = torch.empty(2, 3, of.experts, dtype=torch.int64, device=META)
    every = (gate_up,) * of.experts, (down,) * of.experts
    return PackedExperts(*every, 0, swiglu_limit, addresses)


def mixtures() -> Iterator[Launch]:
    """What stands before and behind experts, with a shared one and without."""

    def run(rows: int, *, shared: bool) -> None:
        ops, of = kernels(), _Experts(rows, experts=256)
        x = torch.empty(rows, of.hidden, dtype=BF16, device=META)
        scores, gate_up, down = _pack("bf16", of.experts + shared, of.hidden), None, None
        if shared:
            gate_up = _pack("bf16", 2 * of.inner, of.hidden)
            down = _pack("bf16", of.hidden, of.inner)
        else:
            scores = replace(scores, bias=torch.empty(of.experts, dtype=BF16, device=META))
        mixture = ops.route_tokens(x, Router(scores, None, of.top_k, True), gate_up)
        packed = _experts("bf16", of)
        weight = torch.empty(of.hidden, device=META)
        ops.mix_experts_add_rms_norm(mixture, packed, down, torch.empty_like(x), weight, 1e-6)

    for rows, shared in product((1, 512), (True, False)):
        case = f"mixture bf16 M={rows}{'' if shared else ' without a shared expert'}"
        yield Launch("moe", case, partial(run, rows, shared=shared))
    yield Launch("clamped_swiglu", "clamped_swiglu", _activate)


def _activate() -> None:
    """Experts of several layouts, which are run one by one, have it in a launch of its own."""
    kernels().clamped_swiglu(torch.empty(4, 1024, dtype=BF16, device=META), 7.0)
