"""The kernels of a model whose products may have adapters.

A step without adapters is run by the plain kernels, whole layers in one call. In other steps each
product is computed by itself, and its rows' adapters are added before what follows it: the same
bits for a row without one, since plain kernels fuse without changing any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.add_adapters import AdapterWeights
from surestep_kernels.dense_layer import DenseLayer, LayerTokens, RunDenseLayers
from surestep_kernels.moe import ExpertAdapters, Mixture, PackedExperts, Router
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

from surestep_worker.checkpoint.parameters import Piece


class AdaptedProduct(NamedTuple):
    """A product of this rank that may have adapters, or one of each of its experts."""

    packed: PackedLinear  # or that of the first expert
    items: Sequence[Sequence[Piece]]  # of the model's linear layers that each is made of, in order


class Stack(NamedTuple):
    """Sizes of a layer's experts, whose weights an adapter may have in one."""

    experts: int  # on all ranks
    inner: int
    width: int
    paired: bool = False  # the rows of gates and ups take turns in it

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of each expert's linear layers, by name."""
        wide = self.inner, self.width
        return {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}

    def rows(self, outputs: int, inputs: int) -> dict[str, slice]:
        """Return which rows of a stack of this size are each linear layer's; none of no stack."""
        gates = slice(0, None, 2) if self.paired else slice(0, self.inner)
        ups = slice(1, None, 2) if self.paired else slice(self.inner, None)
        if (outputs, inputs) == (2 * self.inner, self.width):
            return {"gate_proj": gates, "up_proj": ups}
        return {"down_proj": slice(None)} if (outputs, inputs) == (self.width, self.inner) else {}


class AdaptedRows:
    """The products of a rank, and which adapters the rows of the step under way have."""

    def __init__(self) -> None:
        self.products: dict[str, AdaptedProduct] = {}  # as the model took them, by name
        self.stacks: dict[str, Stack] = {}  # by name of the module
        self._weights: Mapping[int, AdapterWeights] = {}  # by id of the packed weight
        self._places: Tensor | None = None

    @property
    def none(self) -> bool:
        """Return whether no row of the step has an adapter."""
        return self._places is None

    def use(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Use these weights for the products, by name, from now on."""
        self._weights = {id(self.products[name].packed): w for name, w in weights.items()}

    @contextmanager
    def of_step(self, places: Tensor | None) -> Iterator[None]:
        """Run a pass over tokens that have the adapters at these places i32[T]; None: none has."""
        self._places = places
        try:
            yield
        finally:
            self._places = None

    def add(self, kernels: KernelSet, y: Tensor, x: Tensor, packed: PackedLinear) -> Tensor:
        """Add to the product y [T, N] of x [T, K] what the rows' adapters make of x."""
        weights = self._weights.get(id(packed))
        if self._places is not None and weights is not None:
            kernels.add_adapters(y, x, self._places, weights)
        return y

    def of_experts(self, packed: PackedExperts) -> ExpertAdapters | None:
        """Return what the rows' adapters have for these experts; None: nothing."""
        gate_up, down = (self._weights.get(id(of[0])) for of in (packed.gate_up, packed.down))
        if self._places is None or gate_up is None or down is None:
            return None
        return ExpertAdapters(self._places, gate_up, down)

    def adapt_experts(
        self, name: str, module: str, packed: PackedExperts, stack: Stack, keep: slice
    ) -> None:
        """Let the experts of a module have adapters. Of each, this rank has the columns `keep`."""
        sizes, wide = stack.layers, slice(0, stack.width)
        cuts = {"gate_proj": (keep, wide), "up_proj": (keep, wide), "down_proj": (wide, keep)}

        def piece(expert: int, layer: str) -> Piece:
            (rows, columns), at = cuts[layer], f"{module}.{packed.first + expert}.{layer}"
            return Piece(at, *sizes[layer], rows.start, rows.stop, columns.start, columns.stop)

        self.stacks[module] = stack
        for last, of, layers in (
            ("gate_up", packed.gate_up, ("gate_proj", "up_proj")),
            ("down", packed.down, ("down_proj",)),
        ):
            items = [[piece(i, layer) for layer in layers] for i in range(len(of))]
            self.products[f"{name}.{last}"] = AdaptedProduct(of[0], items)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedKernels(KernelSet):
    """Plain kernels, with adapters in the steps that have any."""

    plain: KernelSet
    rows: AdaptedRows

    @property
    def _now(self) -> tuple[type[KernelSet], KernelSet]:
        """Return whose methods run this step, and on what."""
        return (type(self.plain), self.plain) if self.rows.none else (KernelSet, self)

    def linear_silu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        kind, ops = self._now
        return kind.linear_silu_and_mul(ops, x, packed)

    def linear_gelu_and_mul(self, x: Tensor, packed: PackedLinear) -> Tensor:
        kind, ops = self._now
        return kind.linear_gelu_and_mul(ops, x, packed)

    def linear_add_rms_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        kind, ops = self._now
        return kind.linear_add_rms_norm(ops, x, packed, residual, weight, eps)

    def route_tokens(self, x: Tensor, router: Router, gate_up: PackedLinear | None) -> Mixture:
        kind, ops = self._now
        return kind.route_tokens(ops, x, router, gate_up)

    def mix_experts_add_rms_norm(
        self,
        mixture: Mixture,
        packed: PackedExperts,
        shared_down: PackedLinear | None,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Tensor:
        kind, ops = self._now
        last = shared_down, residual, weight, eps
        return kind.mix_experts_add_rms_norm(ops, mixture, packed, *last)

    def project_heads(
        self,
        x: Tensor,
        projection: HeadProjection,
        positions: Tensor,
        cache: LayerCache,
        kv_slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kind, ops = self._now
        return kind.project_heads(ops, x, projection, positions, cache, kv_slots)

    def dense_layers(
        self, layers: Sequence[DenseLayer], next_norms: Sequence[Tensor]
    ) -> RunDenseLayers:
        plain = self.plain.dense_layers(layers, next_norms)
        adapted = KernelSet.dense_layers(self, layers, next_norms)

        def run(
            x: Tensor,
            residual: Tensor,
            places: Sequence[tuple[LayerTokens, LayerCache]],
            first: int = 0,
        ) -> Tensor:
            return (plain if self.rows.none else adapted)(x, residual, places, first)

        return run


def with_adapters(plain: KernelSet) -> AdaptedKernels:
    """Return these kernels for a model that may have adapters."""
    rows = AdaptedRows()

    def linear(x: Tensor, packed: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        return rows.add(plain, plain.linear(x, packed, out_dtype), x, packed)

    def moe(
        total: Tensor, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts
    ) -> None:
        plain.moe(total, x, weights, experts, packed, adapters=rows.of_experts(packed))

    ops = {field.name: getattr(plain, field.name) for field in fields(KernelSet)}
    return AdaptedKernels(**ops | {"linear": linear, "moe": moe}, plain=plain, rows=rows)


def plain_kernels(kernels: KernelSet) -> KernelSet:
    """Return the kernels for what has no adapters: heads that draft."""
    return kernels.plain if isinstance(kernels, AdaptedKernels) else kernels
