"""Routed experts: gated feed-forward layers of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_kernels.add_adapters import AdapterWeights, AddAdapters, add_adapters_reference
from surestep_kernels.clamped_swiglu import ClampedSwiglu, clamped_swiglu_reference
from surestep_kernels.linear import Linear, PackedLinear, linear_reference
from surestep_kernels.route import SigmoidChoice
from surestep_kernels.silu_and_mul import silu_and_mul_reference


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Experts first, first + 1, ... in the layout of the KernelSet that packed them."""

    gate_up: tuple[PackedLinear, ...]  # H inputs; I outputs of the gate, then I to be gated
    down: tuple[PackedLinear, ...]  # I inputs, H outputs
    first: int
    swiglu_limit: float | None = None  # of clamped_swiglu; None: the activation is silu_and_mul
    addresses: Tensor | None = None  # if the layout looks weights up on the device


class Router(NamedTuple):
    """The router of a layer that has routed experts, and possibly one shared expert."""

    scores: PackedLinear  # H inputs; one output per expert, and the gate unless it is separate
    gate: PackedLinear | None  # of the shared expert: one output
    top_k: int
    normalize: bool  # see route_reference
    # Then scores have no gate, and a shared expert counts as it is.
    sigmoid: SigmoidChoice | None = None


class Mixture(NamedTuple):
    """The experts that T tokens are routed to, and their weights."""

    x: Tensor  # [T, H]
    weights: Tensor  # f32[T, k]
    experts: Tensor  # i64[T, k]
    gate: Tensor | None = None  # [T, 1] of the shared expert, before the sigmoid; None: 1
    shared: Tensor | None = (
        None  # [T, I] the shared expert's activations, input of its last product
    )


class ExpertAdapters(NamedTuple):
    """Adapters of experts. That at place p has its share of the e-th of E packed experts at place
    p * E + e of the weights."""

    places: Tensor  # i32[T] of the tokens' adapters; -1 for one without
    gate_up: AdapterWeights
    down: AdapterWeights

    def of(self, tokens: Tensor, local: Tensor | int, count: int) -> Tensor:
        """Return the places i32[P] in the weights for these tokens at one of `count` experts each;
        -1 where it is not packed."""
        places, local = self.places[tokens], torch.as_tensor(local, device=tokens.device)
        none = (places < 0) | (local < 0) | (local >= count)
        return torch.where(none, -1, places * count + local).to(torch.int32)


class PackExperts(Protocol):
    """Pack the projections of experts first, first + 1, ...; the packed weights are kept as they
    are. With a `swiglu_limit` the activation is clamped_swiglu, otherwise silu_and_mul."""

    def __call__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        first: int,
        swiglu_limit: float | None = None,
    ) -> PackedExperts: ...


class Moe(Protocol):
    def __call__(
        self,
        total: Tensor,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        packed: PackedExperts,
        *,
        adapters: ExpertAdapters | None = None,
    ) -> None: ...


def pack_experts_reference(
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    first: int,
    swiglu_limit: float | None = None,
) -> PackedExperts:
    """Keep the experts one by one."""
    return PackedExperts(tuple(gate_up), tuple(down), first, swiglu_limit)


def moe_reference(
    total: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    *,
    adapters: ExpertAdapters | None = None,
    linear: Linear = linear_reference,
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul_reference,
    clamped_swiglu: ClampedSwiglu = clamped_swiglu_reference,
    add_adapters: AddAdapters = add_adapters_reference,
) -> None:
    """Add to total f32[T, H] the outputs of the experts for x [T, H], times their weights.

    Token t uses the experts i64[T, k] of row t, which are distinct, with weights f32[T, k]. They
    are added one after the other, in the order of their numbers; experts that are not packed,
    because other ranks have them, add nothing. The shares of `adapters` are added to the products.
    """
    limit, count = packed.swiglu_limit, len(packed.down)
    for expert in experts.unique().tolist():
        local = expert - packed.first
        if 0 <= local < count:
            token, choice = (experts == expert).nonzero(as_tuple=True)
            rows = x[token]
            gate_up = linear(rows, packed.gate_up[local])
            if adapters is not None:
                places = adapters.of(token, local, count)
                add_adapters(gate_up, rows, places, adapters.gate_up)
            inner = silu_and_mul(gate_up) if limit is None else clamped_swiglu(gate_up, limit)
            out = linear(inner, packed.down[local], out_dtype=total.dtype)
            if adapters is not None:
                add_adapters(out, inner, places, adapters.down)
            total[token] += out * weights[token, choice, None]
