"""Llama, Mistral, Qwen2 and Qwen3: one decoder, whose differences are fields of ModelConfig."""

from __future__ import annotations

import torch
from surestep_kernels import KernelSet
from surestep_kernels.kv_cache import LayerCache
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.caches import Caches
from surestep_worker.kv_cache import KVSpec
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.norm import output_bound
from surestep_worker.layers.residual import Product, Residual
from surestep_worker.tp import TensorParallel

from .config import ModelConfig
from .dense_weights import Layer, take_layer
from .mtp import MtpHead
from .prepared import Weights


class DenseModel:
    """The part of a decoder that one rank holds. Call under torch.inference_mode."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tp: TensorParallel,
        kernels: KernelSet,
        rotary: Tensor,
    ) -> None:
        """Take every parameter of `parameter_table` from `weights`; rotary is f32[P, D]."""
        self.config = config
        self._tp = tp
        self._kernels = kernels
        self._num_kv_heads = max(1, config.num_kv_heads // tp.size)
        self._vocabulary = Vocabulary(config, weights, kernels, tp)
        self._layers = [
            take_layer(f"{i}.", config, tp, weights, kernels, rotary)
            for i in range(config.num_layers)
        ]
        norm = weights.take("norm", torch.float32)
        self._input_norms = [*(layer.input_norm for layer in self._layers), norm]
        self.hidden_bound = output_bound(norm)
        self.has_head = self._vocabulary.has_head
        self.mtp: MtpHead | None = None
        self.weight_bytes = weights.nbytes

    def kv_spec(self, block_size: int) -> KVSpec:
        """What this rank's KV cache must hold, in blocks of `block_size` tokens."""
        return KVSpec(
            num_layers=self.config.num_layers,
            num_kv_heads=self._num_kv_heads,
            head_dim=self.config.head_dim,
            block_size=block_size,
            dtype=self._vocabulary.dtype,
        )

    def recurrent_spec(self) -> None:
        """There are no recurrent layers."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T]."""
        return self._vocabulary.embed(token_ids)

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, writing their keys and values; returns the normed hidden [T, H]."""
        hidden = self.embed(batch.token_ids)
        residual = Residual(hidden, self._kernels, self._tp, self.config.rms_norm_eps)
        x, next_norms = residual.normed(self._input_norms[0]), self._input_norms[1:]
        for layer, next_norm, cache in zip(self._layers, next_norms, caches.kv.layers, strict=True):
            x = residual.add(self._attention(layer, x, batch, cache), layer.post_norm)
            x = residual.add(layer.mlp(x), next_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        return self._vocabulary.logits(hidden)

    def _attention(self, layer: Layer, x: Tensor, batch: StepBatch, cache: LayerCache) -> Product:
        ops = self._kernels
        q, _ = ops.project_heads(x, layer.qkv, batch.positions, cache, batch.kv_slots)
        out = ops.paged_attention(q, cache, batch.rows, self.config.head_dim**-0.5)
        return Product(out.flatten(1), layer.o)
