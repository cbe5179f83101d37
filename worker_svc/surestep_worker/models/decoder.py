"""The one decoder: what differs between models is in their configurations and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVSpec
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    PAGED,
    SLIDING_ATTENTION,
    ModelConfig,
)
from surestep_worker.configs.routed import RoutedConfig
from surestep_worker.layers.attention import Attention, sliding_attention
from surestep_worker.layers.batch import StepBatch
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.decoder_layer import DecoderLayer, FeedForward, Mixer
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.gated_delta_net import GatedDeltaNet
from surestep_worker.layers.mlp import GatedMlp
from surestep_worker.layers.moe import GptOssMoe, SparseMoe
from surestep_worker.layers.norm import output_bound, take_norm
from surestep_worker.layers.residual import Residual

from .mtp import PREFIX, MtpHead

# By type of layer; each takes the beginning of its parameters' names and its layer of the cache.
MIXERS: Mapping[str, Callable[[str, LayerContext[Any], int], Mixer]] = {
    FULL_ATTENTION: Attention,
    SLIDING_ATTENTION: sliding_attention,
    LINEAR_ATTENTION: GatedDeltaNet,
}


class Decoder:
    """The part of a decoder that one rank holds. Call under torch.inference_mode."""

    def __init__(self, context: LayerContext[Any]) -> None:
        """Take every parameter of the model's table from the context's weights."""
        config: ModelConfig = context.config
        self.config = config
        self._tp, self._kernels = context.shard.tp, context.kernels
        self._vocabulary = Vocabulary(context)
        self._layers = [
            _layer(f"{i}.", context, kind, cache_layer=_cache_layer(config, i))
            for i, kind in enumerate(config.layer_types)
        ]
        norm = take_norm(context, "norm")
        self._input_norms = [*(layer.input_norm for layer in self._layers), norm]
        self.hidden_bound = output_bound(norm)
        self.has_head = self._vocabulary.has_head
        self._kv_layers = sum(kind in PAGED for kind in config.layer_types)
        self.draft_head: MtpHead | None = None
        if PREFIX + "norm" in context.weights:
            layer = _layer(PREFIX, context, FULL_ATTENTION, cache_layer=self._kv_layers)
            self.draft_head = MtpHead(context, layer)
            self._kv_layers += 1
        self.weight_bytes = context.weights.nbytes

    def kv_spec(self, block_size: int) -> KVSpec:
        """Return what this rank's KV cache must hold, in blocks of `block_size` tokens."""
        config = self.config
        return KVSpec(
            num_layers=self._kv_layers,
            num_kv_heads=max(1, config.num_kv_heads // self._tp.size),
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=self._vocabulary.dtype,
            kept_hidden=config.hidden_size if self.draft_head is not None else 0,
        )

    def recurrent_spec(self) -> RecurrentSpec | None:
        """Return what this rank's recurrent cache must hold; None without recurrent layers."""
        return self.config.recurrent_spec(self._vocabulary.dtype, self._tp.size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T]."""
        return self._vocabulary.embed(token_ids)

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; return the normed hidden states [T, H]."""
        hidden = self.embed(batch.token_ids)
        residual = Residual(hidden, self._kernels, self._tp, self.config.rms_norm_eps)
        x = residual.normed(self._input_norms[0])
        for layer, next_norm in zip(self._layers, self._input_norms[1:], strict=True):
            x = layer(x, residual, next_norm, batch, caches)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        return self._vocabulary.logits(hidden)


def _cache_layer(config: ModelConfig, layer: int) -> int:
    """Layers before this one whose memory is in the same cache."""
    paged = config.layer_types[layer] in PAGED
    return sum((kind in PAGED) == paged for kind in config.layer_types[:layer])


def _layer(to: str, context: LayerContext[Any], kind: str, *, cache_layer: int) -> DecoderLayer:
    mixer = MIXERS[kind](f"{to}mixer.", context, cache_layer)
    return DecoderLayer(to, context, mixer, _feed_forward(f"{to}mlp.", context))


def _feed_forward(to: str, context: LayerContext[Any]) -> FeedForward:
    if isinstance(context.config, RoutedConfig):
        return GptOssMoe(to, context)
    return (SparseMoe if f"{to}router" in context.weights else GatedMlp)(to, context)
