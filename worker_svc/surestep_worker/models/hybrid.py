"""Qwen3-Next and Qwen3.5: a decoder of gated delta rule and gated attention layers."""

from __future__ import annotations

from surestep_kernels import KernelSet
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.kv_cache import KVSpec
from surestep_worker.layers.decoder_layer import DecoderLayer, FeedForward, Mixer
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.gated_attention import GatedAttention
from surestep_worker.layers.gated_delta_net import GatedDeltaNet
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.mlp import GatedMlp
from surestep_worker.layers.moe import SparseMoe
from surestep_worker.layers.norm import output_bound, take_zero_centred
from surestep_worker.layers.residual import Residual
from surestep_worker.recurrent import RecurrentSpec

from .hybrid_config import HybridConfig
from .mtp import MtpHead
from .prepared import Weights


class HybridModel:
    """The part of a hybrid decoder that one rank holds. Call under torch.inference_mode."""

    def __init__(
        self,
        config: HybridConfig,
        weights: Weights,
        shard: Sharding,
        kernels: KernelSet,
        rotary: Tensor,
    ) -> None:
        """Take every parameter of `parameter_table` from `weights`; rotary is f32[P, D']."""
        self.config = config
        self._tp = shard.tp
        self._shard = shard
        self._kernels = kernels
        self._rotary = rotary
        self._vocabulary = Vocabulary(config, weights, kernels, self._tp)
        self._layers = [
            self._layer(f"{i}.", self._mixer(i, weights), weights) for i in range(config.num_layers)
        ]
        norm = take_zero_centred(weights, "norm")
        self._input_norms = [*(layer.input_norm for layer in self._layers), norm]
        self.hidden_bound = output_bound(norm)
        self.has_head = self._vocabulary.has_head
        self.mtp = self._mtp(weights) if "mtp.norm" in weights else None
        self.weight_bytes = weights.nbytes

    def _layer(self, to: str, mixer: Mixer, weights: Weights) -> DecoderLayer:
        return DecoderLayer(to, mixer, self._mlp(f"{to}mlp.", weights), weights)

    def _mixer(self, i: int, weights: Weights) -> Mixer:
        types = self.config.layer_types
        build = self._attention if types[i] == "full_attention" else self._delta_net
        return build(f"{i}.mixer.", weights, types[:i].count(types[i]))

    def _attention(self, to: str, weights: Weights, cache_layer: int) -> GatedAttention:
        size = self._tp.size
        return GatedAttention(
            to, self.config, weights, self._kernels, self._rotary, size, cache_layer
        )

    def _delta_net(self, to: str, weights: Weights, cache_layer: int) -> GatedDeltaNet:
        return GatedDeltaNet(to, self.config, weights, self._kernels, self._tp.size, cache_layer)

    def _mlp(self, to: str, weights: Weights) -> FeedForward:
        if f"{to}router" in weights:
            return SparseMoe(to, self.config, weights, self._kernels, self._shard)
        return GatedMlp(to, weights, self._kernels)

    def _mtp(self, weights: Weights) -> MtpHead:
        cache_layer = self.config.layer_types.count("full_attention")  # behind the model's own
        mixer = self._attention("mtp.mixer.", weights, cache_layer)
        layer = self._layer("mtp.", mixer, weights)
        return MtpHead(layer, weights, self._kernels, self._tp, self.config.rms_norm_eps)

    def kv_spec(self, block_size: int) -> KVSpec:
        """What this rank's KV cache must hold, in blocks of `block_size` tokens."""
        config = self.config
        return KVSpec(
            num_layers=config.layer_types.count("full_attention") + (self.mtp is not None),
            num_kv_heads=max(1, config.num_kv_heads // self._tp.size),
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=self._vocabulary.dtype,
            hidden_size=config.hidden_size if self.mtp is not None else 0,
        )

    def recurrent_spec(self) -> RecurrentSpec:
        """What this rank's recurrent cache must hold."""
        return self.config.recurrent_spec(self._vocabulary.dtype, self._tp.size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T]."""
        return self._vocabulary.embed(token_ids)

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; returns the normed hidden [T, H]."""
        hidden = self.embed(batch.token_ids)
        residual = Residual(hidden, self._kernels, self._tp, self.config.rms_norm_eps)
        x = residual.normed(self._input_norms[0])
        for layer, next_norm in zip(self._layers, self._input_norms[1:], strict=True):
            x = layer(x, residual, next_norm, batch, caches)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        return self._vocabulary.logits(hidden)
