"""A pre-norm decoder layer around any mixer and feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

from surestep_kernels.mixers.dense_layer import RunDenseLayer
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.configs.model_config import ModelConfig

from .attention import Attention
from .batch import StepBatch
from .context import LayerContext
from .mlp import GatedMlp
from .norm import take_norm
from .residual import Residual, Share

Mixer = Callable[[Tensor, StepBatch, Caches], Share]
FeedForward = Callable[[Tensor], Share]


class DecoderLayer:
    """Residual layer on one rank. Mixer and feed-forward return shares of a sum over the ranks."""

    def __init__(
        self, to: str, context: LayerContext[ModelConfig], mixer: Mixer, mlp: FeedForward
    ) -> None:
        self._mixer = mixer
        self._mlp = mlp
        self.input_norm = take_norm(context, f"{to}input_norm")  # of what it reads
        self._post_norm = take_norm(context, f"{to}post_norm")
        self._dense = self._ready(context)

    def _ready(self, context: LayerContext[ModelConfig]) -> RunDenseLayer | None:
        """The whole layer as one op, if no rank waits for another inside it."""
        mixer, mlp = self._mixer, self._mlp
        if not (isinstance(mixer, Attention) and isinstance(mlp, GatedMlp)):
            return None
        dense = mixer.with_mlp(mlp, self._post_norm, context)
        if dense is None or context.shard.tp.size > 1:
            return None
        return context.kernels.dense_layer(dense)

    def __call__(
        self, x: Tensor, residual: Residual, next_norm: Tensor, batch: StepBatch, caches: Caches
    ) -> Tensor:
        """[T, H] -> [T, H], both normalised, the latter with the weight that follows the layer."""
        if self._dense is not None:
            assert isinstance(self._mixer, Attention)
            tokens, cache = self._mixer.pages(batch, caches)
            return self._dense(x, residual.hidden, next_norm, tokens, cache)
        x = residual.add(self._mixer(x, batch, caches), self._post_norm)
        return residual.add(self._mlp(x), next_norm)
