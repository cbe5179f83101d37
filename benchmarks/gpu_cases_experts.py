"""Cases of routed experts, and of what stands before and behind them in a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import torch
from gpu_sizes import BYTES, Case, ExpertSizes, Sizes, Work, activations, floats, kernels, size
from gpu_weights import PACK, weight_bytes
from surestep_kernels import PackedLinear
from surestep_kernels.ops.moe import Mixture, PackedExperts, Router
from torch import Tensor


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

    for name, m in product(("bf16", "fp8", "int4", "w8a8"), of.rows):
        shape = f"T={m} E={of.experts} k={of.top_k} H={s.hidden} I={of.inner}"
        yield Case(f"moe {name}", shape, partial(make, m=m, name=name), cold=True)


def route_tokens(s: Sizes) -> Iterator[Case]:
    """With a shared expert as wide as the others."""
    of = s.experts
    if of is None:
        return

    def make(device: str, m: int) -> Work:
        x = activations(device, m, s.hidden)
        router = Router(PACK["bf16"](device, of.experts + 1, s.hidden), None, of.top_k, True)
        gate_up = PACK["bf16"](device, 2 * of.inner, s.hidden)
        moved = weight_bytes(router.scores) + weight_bytes(gate_up) + x.nbytes
        moved += m * (of.inner * BYTES + of.top_k * (4 + 8))
        run = partial(kernels().route_tokens, x, router, gate_up)
        return Work(run, moved, 2 * m * s.hidden * (of.experts + 1 + 2 * of.inner))

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
        packed, down = _pack_experts(device, s.hidden, of, "bf16"), _down(device, s.hidden, of)
        mixture, residual = _mixture(device, m, s.hidden, of), activations(device, m, s.hidden)
        behind = (residual, floats(device, s.hidden), 1e-6) if name != "mix_experts" else ()
        used = mixture.experts.unique().tolist()
        read = sum(weight_bytes(packed.gate_up[e]) + weight_bytes(packed.down[e]) for e in used)
        flop = 2 * m * s.hidden * of.inner * (3 * of.top_k + 1)
        run = partial(getattr(kernels(), name), mixture, packed, down, *behind)
        return Work(run, read + weight_bytes(down) + size(*mixture) + 2 * residual.nbytes, flop)

    for m in of.rows:
        shape = f"T={m} E={of.experts} k={of.top_k} H={s.hidden} I={of.inner}"
        yield Case(f"{name} bf16", shape, partial(make, m=m), cold=True)


def _mixture(device: str, m: int, hidden: int, of: ExpertSizes) -> Mixture:
    """Weights are large numbers: x is small, so that no gate overflows."""
    experts = floats(device, m, of.experts).argsort(dim=1)[:, : of.top_k].contiguous()
    shared, gate = activations(device, m, of.inner), activations(device, m, 1)
    x: Tensor = activations(device, m, hidden) / 1024
    return Mixture(x, floats(device, m, of.top_k), experts, gate, shared)


def _down(device: str, hidden: int, of: ExpertSizes) -> PackedLinear:
    return PACK["bf16"](device, hidden, of.inner)


@cache
def _pack_experts(device: str, hidden: int, of: ExpertSizes, name: str) -> PackedExperts:
    """Those of one layer: too large to have several times."""
    pack = PACK[name]
    gate_up = [pack(device, 2 * of.inner, hidden) for _ in range(of.experts)]
    down = [pack(device, hidden, of.inner) for _ in range(of.experts)]
    return kernels().pack_experts(gate_up, down, 0)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "route": route,
    "moe": moe,
    "route_tokens": route_tokens,
    "mix_experts": mix_experts,
    "mix_experts_add_rms_norm": mix_experts_add_rms_norm,
}
