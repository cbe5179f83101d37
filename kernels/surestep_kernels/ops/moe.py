"""Routed experts: gated feed-forward layers of which every token takes a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from .clamped_swiglu import ClampedSwiglu, clamped_swiglu_reference
from .linear import Linear, PackedLinear, linear_reference
from .silu_and_mul import silu_and_mul_reference


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Experts first, first + 1, ... in the layout of the KernelSet that packed them."""

    gate_up: tuple[PackedLinear, ...]  # H inputs; I outputs of the gate, then I to be gated
    down: tuple[PackedLinear, ...]  # I inputs, H outputs
    first: int
    swiglu_limit: float | None = None  # of clamped_swiglu; None: the activation is silu_and_mul
    addresses: Tensor | None = None  # where the layout looks weights up on the device


class Router(NamedTuple):
    """Of a layer whose tokens take some of its experts, and one that is shared, if there is one."""

    scores: PackedLinear  # H inputs; an output for each expert, then the gate unless that is apart
    gate: PackedLinear | None  # of the shared expert: one output
    top_k: int
    normalize: bool  # see route_reference


class Mixture(NamedTuple):
    """What T tokens take of a layer's experts, and how much of it."""

    x: Tensor  # [T, H]
    weights: Tensor  # f32[T, k]
    experts: Tensor  # i64[T, k]
    gate: Tensor | None = None  # [T, 1] of the shared expert, before the sigmoid
    shared: Tensor | None = None  # [T, I] what the shared expert's last product is made of


class PackExperts(Protocol):
    """The packed projections of experts first, first + 1, ..., which are kept as they are.

    With a `swiglu_limit` their activation is clamped_swiglu, otherwise silu_and_mul.
    """

    def __call__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        first: int,
        swiglu_limit: float | None = None,
    ) -> PackedExperts: ...


class Moe(Protocol):
    """See moe_reference."""

    def __call__(
        self, total: Tensor, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts
    ) -> None: ...


def pack_experts_reference(
    gate_up: Sequence[PackedLinear],
    down: Sequence[PackedLinear],
    first: int,
    swiglu_limit: float | None = None,
) -> PackedExperts:
    """The experts, one by one."""
    return PackedExperts(tuple(gate_up), tuple(down), first, swiglu_limit)


def moe_reference(
    total: Tensor,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    packed: PackedExperts,
    *,
    linear: Linear = linear_reference,
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul_reference,
    clamped_swiglu: ClampedSwiglu = clamped_swiglu_reference,
) -> None:
    """total f32[T, H] += what the experts make of x [T, H], times their weights.

    Token t takes the experts i64[T, k] of row t, no one twice, with weights f32[T, k]. They are
    added one after the other, in the order of their numbers; those that are not packed, which other
    ranks have, add nothing.
    """
    limit = packed.swiglu_limit
    for expert in experts.unique().tolist():
        local = expert - packed.first
        if 0 <= local < len(packed.down):
            token, choice = (experts == expert).nonzero(as_tuple=True)
            gate_up = linear(x[token], packed.gate_up[local])
            inner = silu_and_mul(gate_up) if limit is None else clamped_swiglu(gate_up, limit)
            out = linear(inner, packed.down[local], out_dtype=total.dtype)
            total[token] += out * weights[token, choice, None]
