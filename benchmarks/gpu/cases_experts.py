"""Cases of routed experts, and of what stands before and behind them in a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product

import torch
from surestep_kernels import PackedLinear
from surestep_kernels.moe import Mixture, PackedExperts, Router
from torch import Tensor

from gpu.sizes import BYTES, Case, ExpertSizes, Sizes, Work, activations, floats, kernels, size
from gpu.weights import EXPERT_PACK, PACK, weight_bytes


def route(s: Sizes) -> Iterator[Case]:
    of = s.experts
    if of is None:
        return

    def make(device: str, m: int) -> Work:
        logits = torch.randn(m, of.experts, device=device)
        run = partial(kernels().route, logits, of.top_k, normalize=True)
        return Work(run, logits.nbytes + m * of.top_k * (4 + 8))

    for m in of.rows:
        yield Case("route", f"T={m} E={of.experts} k={of.top_k}", partial(make, m=m))


def moe(s: Sizes) -> Iterator[Case]:
    """Each buffer has its own choice of experts, among many more than L2 holds.

    Weights are large numbers: x is small, so that no gate overflows.
    """
    of = s.experts
    if of is None:
        return

    def make(device: str, m: int, name: str) -> Work:
        fp8 = name == "w8a8"
        packed = _pack_experts(device, s.hidden, of, "fp8" if fp8 else name)
        experts = floats(device, m, of.experts).argsort(dim=1)[:, : of.top_k].contiguous()
        weights, x = floats(device, m, of.top_k), activations(device, m, s.hidden) / 1024
        total = floats(device, m, s.hidden)
        ops = kernels(activation_dtype="fp8" if fp8 else "auto")
        run = partial(ops.moe, total, x, weights, experts, packed)
        used = experts.unique().tolist()
        read = sum(weight_bytes(packed.gate_up[e]) + weight_bytes(packed.down[e]) for e in used)
        flop = 2 * m * of.top_k * 3 * s.hidden * of.inner
        return Work(run, read + size(x, weights, experts) + 2 * total.nbytes, flop)

    names = ("bf16", "mxfp4") if of.gpt_oss else ("bf16", "fp8", "int4", "w8a8")
    for name, m in product(names, of.rows):
        shape = f"T={m} E={of.experts} k={of.top_k} H={s.hidden} I={of.inner}"
        yield Case(f"moe {name}", shape, partial(make, m=m, name=name), cold=True)


def clamped_swiglu(s: Sizes) -> Iterator[Case]:
    """Yield cases of all pairs, which the experts' kernel does itself."""
    of = s.experts
    if of is None or not of.gpt_oss:
        return

    def make(device: str, m: int) -> Work:
        x = activations(device, m * of.top_k, 2 * of.inner)
        return Work(partial(kernels().clamped_swiglu, x, 7.0), 3 * x.nbytes // 2)

    for m in of.rows:
        yield Case("clamped_swiglu", f"T={m * of.top_k} I={of.inner}", partial(make, m=m))


def route_tokens(s: Sizes) -> Iterator[Case]:
    """With a shared expert as wide as the others, or none and biased scores."""
    of = s.experts
    if of is None:
        return

    def make(device: str, m: int) -> Work:
        x, pack = activations(device, m, s.hidden), PACK["bf16"]
        if of.gpt_oss:
            bias = activations(device, of.experts)
            gate_up, scores = None, replace(pack(device, of.experts, s.hidden), bias=bias)
        else:
            gate_up = pack(device, 2 * of.inner, s.hidden)
            scores = pack(device, of.experts + 1, s.hidden)
        router = Router(scores, None, of.top_k, True)
        moved = weight_bytes(scores) + x.nbytes + m * of.top_k * (4 + 8)
        flop = 2 * m * s.hidden * scores.out_features
        if gate_up is not None:
            moved += weight_bytes(gate_up) + m * of.inner * BYTES
            flop += 2 * m * s.hidden * gate_up.out_features
        return Work(partial(kernels().route_tokens, x, router, gate_up), moved, flop)

    for m in of.rows:
        shape = f"T={m} E={of.experts} k={of.top_k} H={s.hidden} I={of.inner}"
        yield Case("route_tokens", shape, partial(make, m=m), cold=True)


def mix_experts(s: Sizes) -> Iterator[Case]:
    """The routed experts included."""
    yield from _mixing(s, "mix_experts")


def mix_experts_add_rms_norm(s: Sizes) -> Iterator[Case]:
    """The same, with what follows."""
    yield from _mixing(s, "mix_experts_add_rms_norm")


def _mixing(s: Sizes, name: str) -> Iterator[Case]:
    of = s.experts
    if of is None:
        return

    def make(device: str, m: int) -> Work:
        packed = _pack_experts(device, s.hidden, of, "mxfp4" if of.gpt_oss else "bf16")
        down = None if of.gpt_oss else PACK["bf16"](device, s.hidden, of.inner)
        mixture, residual = _mixture(device, m, s.hidden, of), activations(device, m, s.hidden)
        behind = (residual, floats(device, s.hidden), 1e-6) if name != "mix_experts" else ()
        used = mixture.experts.unique().tolist()
        read = sum(weight_bytes(packed.gate_up[e]) + weight_bytes(packed.down[e]) for e in used)
        flop = 2 * m * s.hidden * of.inner * (3 * of.top_k + (down is not None))
        read += 0 if down is None else weight_bytes(down)
        run = partial(getattr(kernels(), name), mixture, packed, down, *behind)
        return Work(run, read + size(*mixture) + 2 * residual.nbytes, flop)

    for m in of.rows:
        shape = f"T={m} E={of.experts} k={of.top_k} H={s.hidden} I={of.inner}"
        weights = "mxfp4" if of.gpt_oss else "bf16"
        yield Case(f"{name} {weights}", shape, partial(make, m=m), cold=True)


def _mixture(device: str, m: int, hidden: int, of: ExpertSizes) -> Mixture:
    """Weights are large numbers: x is small, so that no gate overflows."""
    experts = floats(device, m, of.experts).argsort(dim=1)[:, : of.top_k].contiguous()
    x: Tensor = activations(device, m, hidden) / 1024
    mixture = Mixture(x, floats(device, m, of.top_k), experts)
    if of.gpt_oss:
        return mixture
    shared, gate = activations(device, m, of.inner), activations(device, m, 1)
    return mixture._replace(gate=gate, shared=shared)


@cache
def _pack_experts(device: str, hidden: int, of: ExpertSizes, name: str) -> PackedExperts:
    """Pack the experts of a single layer: too large to have several times."""

    def pack(outputs: int, inputs: int) -> PackedLinear:
        packed = EXPERT_PACK[name](device, outputs, inputs)
        return replace(packed, bias=activations(device, outputs) if of.gpt_oss else None)

    gate_up = [pack(2 * of.inner, hidden) for _ in range(of.experts)]
    down = [pack(hidden, of.inner) for _ in range(of.experts)]
    return kernels().pack_experts(gate_up, down, 0, 7.0 if of.gpt_oss else None)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "route": route,
    "moe": moe,
    "clamped_swiglu": clamped_swiglu,
    "route_tokens": route_tokens,
    "mix_experts": mix_experts,
    "mix_experts_add_rms_norm": mix_experts_add_rms_norm,
}
