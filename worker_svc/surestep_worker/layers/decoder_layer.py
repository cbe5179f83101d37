"""A pre-norm decoder layer around any mixer and feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

from surestep_kernels import KernelSet
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.models.prepared import Weights
from surestep_worker.tp import TensorParallel

from .norm import take_zero_centred

Mixer = Callable[[Tensor, StepBatch, Caches], Tensor]
FeedForward = Callable[[Tensor], Tensor]


class DecoderLayer:
    """Residual layer on one rank. Mixer and feed-forward return shares of a sum over the ranks."""

    def __init__(
        self,
        to: str,
        mixer: Mixer,
        mlp: FeedForward,
        weights: Weights,
        kernels: KernelSet,
        tp: TensorParallel,
        eps: float,
    ) -> None:
        self._mixer = mixer
        self._mlp = mlp
        self._add_norm = kernels.add_rms_norm
        self._tp = tp
        self._eps = eps
        self._input_norm = take_zero_centred(weights, f"{to}input_norm")
        self._post_norm = take_zero_centred(weights, f"{to}post_norm")

    def __call__(self, x: Tensor, residual: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Add x [T, H] to the residual in place; returns what is to be added next."""
        x = self._add_norm(x, residual, self._input_norm, self._eps)
        x = self._tp.all_reduce(self._mixer(x, batch, caches))
        x = self._add_norm(x, residual, self._post_norm, self._eps)
        return self._tp.all_reduce(self._mlp(x))
