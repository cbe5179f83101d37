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
        self._rotary = rotary
        self._num_heads = config.num_heads // tp.size
        self._num_kv_heads = max(1, config.num_kv_heads // tp.size)
        self._vocabulary = Vocabulary(config, weights, kernels, tp)
        self._layers = [take_layer(f"{i}.", weights, kernels) for i in range(config.num_layers)]
        self._norm = weights.take("norm", torch.float32)
        self.hidden_bound = output_bound(self._norm)
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
        add_norm, eps = self._kernels.add_rms_norm, self.config.rms_norm_eps
        residual = self.embed(batch.token_ids)
        x = torch.zeros_like(residual)
        for layer, cache in zip(self._layers, caches.kv.layers, strict=True):
            x = add_norm(x, residual, layer.input_norm, eps)
            x = self._attention(layer, x, batch, cache)
            x = add_norm(x, residual, layer.post_norm, eps)
            x = self._tp.all_reduce(layer.mlp(x))
        return add_norm(x, residual, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        return self._vocabulary.logits(hidden)

    def _attention(self, layer: Layer, x: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        ops, heads, kv_heads = self._kernels, self._num_heads, self._num_kv_heads
        qkv = ops.linear(x, layer.qkv).view(len(x), -1, self.config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = self.config.rms_norm_eps
            q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
        ops.rotary(q, k, batch.positions, self._rotary)
        ops.store_kv(k, v, cache, batch.kv_slots)
        scale = self.config.head_dim**-0.5
        out = ops.paged_attention(q, cache, batch.rows, scale)
        return self._tp.all_reduce(ops.linear(out.flatten(1), layer.o))
