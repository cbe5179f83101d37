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
from surestep_kernels.moe import Mixture, PackedExperts, Router
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

from surestep_worker.checkpoint.parameters import Piece


class AdaptedProduct(NamedTuple):
    """A product of this rank that may have adapters."""

    packed: PackedLinear
    pieces: Sequence[Piece]  # of the model's linear layers that it is made of, in their order


class AdaptedRows:
    """The products of a rank, and which adapters the rows of the step under way have."""

    def __init__(self) -> None:
        self.products: dict[str, AdaptedProduct] = {}  # as the model took them, by name
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

    ops = {field.name: getattr(plain, field.name) for field in fields(KernelSet)}
    return AdaptedKernels(**ops | {"linear": linear}, plain=plain, rows=rows)


def plain_kernels(kernels: KernelSet) -> KernelSet:
    """Return the kernels for what has no adapters: experts, heads that draft."""
    return kernels.plain if isinstance(kernels, AdaptedKernels) else kernels
