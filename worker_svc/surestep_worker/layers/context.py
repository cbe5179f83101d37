"""Surroundings of a layer: the model that it is built for, the rows of a step that it gets, and the
residual stream, which blocks add to and read normalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.dense_layer import LayerTokens
from surestep_kernels.moe import Mixture, PackedExperts
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from torch import Tensor

from surestep_worker.checkpoint.prepared import Weights
from surestep_worker.configs.model_config import ModelConfig
from surestep_worker.distributed.tensor_parallel import TensorParallel

from .linear import Sharding

C_co = TypeVar("C_co", bound=ModelConfig, covariant=True)


class LayerContext(NamedTuple, Generic[C_co]):
    """View of a rank on a model that is being built."""

    config: C_co
    weights: Weights
    shard: Sharding
    kernels: KernelSet
    rotary: Tensor  # f32[P, D'], see rotary_table
    local_rotary: Tensor | None = None  # of layers with a window; None: `rotary`


class GroupPages(NamedTuple):
    """Where the layers of one KV group read and write."""

    rows: AttentionRows  # behind the last page of a slot, and where others were, is NULL_BLOCK
    kv_slots: Tensor  # i64[T] block * block_size + offset that receives the token's key and value


@dataclass(slots=True)
class Choice:
    """Positions that indexers chose for the tokens of a step."""

    positions: Tensor | None = None  # i32[T, K] of the last: layers without one attend to them
    sums: list[Tensor] = field(default_factory=list)  # i32[T] of each, where ranks compare them

    def choose(self, positions: Tensor, *, compared: bool) -> None:
        """Note what the next indexer chose."""
        self.positions = positions
        if compared:
            sums = (positions * positions + positions).sum(dim=1, dtype=torch.int32)  # wrapping
            self.sums.append(sums)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of R rows, all on the model's device."""

    token_ids: Tensor  # i64[T]
    positions: Tensor  # i64[T] index of each token in its sequence
    groups: tuple[GroupPages, ...]  # of the KV cache, see KVLayout
    hidden_index: Tensor  # i64[N] tokens (indices into T) whose final hidden states are wanted
    recurrent: RecurrentRows | None = None  # for models with recurrent layers
    choice: Choice = field(default_factory=Choice)  # for models with indexers
    layer_tokens: tuple[LayerTokens, ...] = field(init=False)  # by KV group

    def __post_init__(self) -> None:
        tokens = tuple(LayerTokens(self.positions, *pages) for pages in self.groups)
        object.__setattr__(self, "layer_tokens", tokens)


NO_NORM = torch.empty(0)  # stands for the factors of a norm that a model does not have


def output_bound(factors: Tensor) -> float:
    """Return what no element that a norm with these factors [H] puts out exceeds in magnitude.

    A vector of root mean square 1 has none above sqrt(H); twice that leaves room for rounding.
    """
    return 2 * math.sqrt(len(factors)) * float(factors.abs().max())


def take_norm(context: LayerContext[ModelConfig], name: str) -> Tensor:
    """Read the factors f32[H] of a norm, of which some checkpoints hold the difference from 1;
    NO_NORM if the model has none of this name."""
    weights = context.weights
    if name not in weights:
        return NO_NORM
    if context.config.zero_centred_norms:
        return weights.take(name, torch.float32, lambda difference: 1.0 + difference)
    return weights.take(name, torch.float32)


class Product(NamedTuple):
    """x [T, K] times a weight: a block's last one, which is left to the residual stream."""

    x: Tensor
    weight: PackedLinear


class Mixed(NamedTuple):
    """Sums of experts for tokens, to be added up: the last op of a block that has experts."""

    mixture: Mixture
    experts: PackedExperts
    shared_down: PackedLinear | None = None  # of the expert that all tokens take, if there is one


Share = Product | Mixed | Tensor  # this rank's part of a sum [T, H] over the ranks


class Residual:
    """The stream of T tokens in one pass on one rank."""

    def __init__(self, hidden: Tensor, kernels: KernelSet, tp: TensorParallel, eps: float) -> None:
        """`hidden` [T, H] is what it begins with, and is overwritten."""
        self._hidden = hidden
        self._ops = kernels
        self._tp = tp
        self._eps = eps

    @property
    def hidden(self) -> Tensor:
        """The stream [T, H] as it is now; the next block adds to it in place."""
        return self._hidden

    def normed(self, weight: Tensor) -> Tensor:
        """Return the input of the first block."""
        if weight is NO_NORM:
            return self._hidden
        return self._ops.rms_norm(self._hidden, weight, self._eps)

    def add(self, share: Share, weight: Tensor) -> Tensor:
        """Add the sum of all ranks' shares; returns what the next block reads.

        Where there is nothing to wait for, a block's last op and the norm are one.
        """
        ops, hidden, eps = self._ops, self._hidden, self._eps
        if isinstance(share, Product) and self._tp.size == 1:
            return ops.linear_add_rms_norm(*share, hidden, weight, eps)
        if isinstance(share, Mixed) and self._tp.size == 1:
            return ops.mix_experts_add_rms_norm(*share, hidden, weight, eps)
        return self.add_total(self.total(share), weight)

    def total(self, share: Share) -> Tensor:
        """Return the sum of all ranks' shares [T, H]."""
        if isinstance(share, Product):
            share = self._ops.linear(*share)
        elif isinstance(share, Mixed):
            share = self._ops.mix_experts(*share)
        return self._tp.all_reduce(share)

    def add_total(self, x: Tensor, weight: Tensor) -> Tensor:
        """Add x [T, H], which every rank has; returns what the next block reads."""
        if weight is NO_NORM:
            self._hidden += x
            return self._hidden
        return self._ops.add_rms_norm(x, self._hidden, weight, self._eps)
