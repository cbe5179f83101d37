"""Decoder layers around any mixer and feed-forward block, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surestep_kernels.dense_layer import DenseLayer, LayerTokens, RunDenseLayers
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.configs.model_config import ModelConfig

from .attention import Attention
from .context import LayerContext, Residual, Share, StepBatch, take_norm
from .mlp import GatedMlp

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
        self.dense = self._as_one_op(context)

    def _as_one_op(self, context: LayerContext[ModelConfig]) -> DenseLayer | None:
        """The whole layer, if no rank waits for another inside it."""
        mixer, mlp = self._mixer, self._mlp
        if not (isinstance(mixer, Attention) and isinstance(mlp, GatedMlp)):
            return None
        if context.shard.tp.size > 1:
            return None
        return mixer.with_mlp(mlp, self._post_norm, context)

    def pages(self, batch: StepBatch, caches: Caches) -> tuple[LayerTokens, LayerCache]:
        """Return the tokens of a step as a `dense` layer sees them, and its cache."""
        assert isinstance(self._mixer, Attention)
        return self._mixer.pages(batch, caches)

    def store(self, x: Tensor, batch: StepBatch, caches: Caches) -> None:
        """Store the keys and values of x [T, H] in the cache of a layer of attention."""
        assert isinstance(self._mixer, Attention)
        self._mixer.store(x, batch, caches)

    def __call__(
        self, x: Tensor, residual: Residual, next_norm: Tensor, batch: StepBatch, caches: Caches
    ) -> Tensor:
        """[T, H] -> [T, H], both normalised, the latter with the weight that follows the layer."""
        x = residual.add(self._mixer(x, batch, caches), self._post_norm)
        return residual.add(self._mlp(x), next_norm)


class BranchLayer(DecoderLayer):
    """Residual layer on one rank whose branches are normalised or scaled at their ends.

    Gemma 2 has norms before and behind attention and MLP, OLMo 2 only behind them, and Granite
    multiplies what they make.
    """

    def __init__(
        self, to: str, context: LayerContext[ModelConfig], mixer: Mixer, mlp: FeedForward
    ) -> None:
        super().__init__(to, context, mixer, mlp)
        self._end_mixer = _end_of(f"{to}after_mixer", context)
        self._end_mlp = _end_of(f"{to}after_mlp", context)

    def _as_one_op(self, context: LayerContext[ModelConfig]) -> DenseLayer | None:
        """Return None: no kernel has these layers as a whole."""
        return None

    def __call__(
        self, x: Tensor, residual: Residual, next_norm: Tensor, batch: StepBatch, caches: Caches
    ) -> Tensor:
        """[T, H] -> [T, H], both as the blocks read them: see DecoderLayer."""

        def add(share: Share, end: Callable[[Tensor], Tensor], norm: Tensor) -> Tensor:
            return residual.add_total(end(residual.total(share)), norm)

        x = add(self._mixer(x, batch, caches), self._end_mixer, self._post_norm)
        return add(self._mlp(x), self._end_mlp, next_norm)


def _end_of(name: str, context: LayerContext[ModelConfig]) -> Callable[[Tensor], Tensor]:
    """Return what the sum of a branch goes through: its norm, or the model's factor."""
    kernels, config = context.kernels, context.config
    if config.branch_norms:
        norm = take_norm(context, name)
        return lambda x: kernels.rms_norm(x, norm, config.rms_norm_eps)
    return lambda x: x.mul_(config.branch_scale)


class LayerStack:
    """Consecutive layers on one rank, run together where kernels have them as one op."""

    def __init__(
        self, context: LayerContext[ModelConfig], layers: Sequence[DecoderLayer], norm: Tensor
    ) -> None:
        """`norm` is the weight of the norm behind the last layer."""
        self._layers = layers
        self.input_norm = layers[0].input_norm
        self._next_norms = [*(layer.input_norm for layer in layers[1:]), norm]
        self._together = self._as_one_op(context)

    def _as_one_op(self, context: LayerContext[ModelConfig]) -> RunDenseLayers | None:
        dense = [layer.dense for layer in self._layers if layer.dense is not None]
        if len(dense) < len(self._layers):
            return None
        return context.kernels.dense_layers(dense, self._next_norms)

    def __len__(self) -> int:
        return len(self._layers)

    def __call__(
        self,
        x: Tensor,
        residual: Residual,
        batch: StepBatch,
        caches: Caches,
        which: range | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H], both normalised: what the first of the layers reads, and what is read
        behind the last of them."""
        which = range(len(self)) if which is None else which
        if self._together is not None and which:
            places = [self._layers[i].pages(batch, caches) for i in which]
            return self._together(x, residual.hidden, places, which.start)
        for i in which:
            x = self._layers[i](x, residual, self._next_norms[i], batch, caches)
        return x
