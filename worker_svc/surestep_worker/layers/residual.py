"""Norms, and the residual stream: what the blocks of a decoder add to, and read normalised."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.moe import Mixture, PackedExperts
from torch import Tensor

from surestep_worker.configs.model_config import ModelConfig
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import LayerContext

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
