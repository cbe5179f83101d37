"""Where the parameters of a dense decoder come from: checkpoint names, merges and rank shares."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.head_projection import HeadProjection
from torch import Tensor

from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.linear import Sharding, take_linear
from surestep_worker.layers.mlp import GatedMlp, mlp_table
from surestep_worker.tp import TensorParallel

from .config import ModelConfig
from .prepared import Weights
from .weights import Parameter

_BUFFERS = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """Regular expressions of checkpoint tensors that hold nothing of their own."""
    return (*_BUFFERS, r"lm_head\.weight") if config.tie_word_embeddings else _BUFFERS


class Layout(NamedTuple):
    """How a checkpoint names its tensors, and whether it has an output head of its own."""

    prefix: str  # of the decoder's tensors
    head: bool

    @classmethod
    def of(cls, config: ModelConfig, names: Container[str]) -> Layout:
        """A decoder that was saved by itself, as embedding models are, has no prefix."""
        bare = "embed_tokens.weight" in names
        head = not (config.is_backbone or config.tie_word_embeddings)
        return cls("" if bare else "model.", head and not (bare and "lm_head.weight" not in names))


class Layer(NamedTuple):
    """Weights of one layer on this rank."""

    input_norm: Tensor  # f32[H]
    qkv: HeadProjection
    o: PackedLinear
    post_norm: Tensor  # f32[H]
    mlp: GatedMlp


def parameter_table(
    config: ModelConfig, tp: TensorParallel, layout: Layout
) -> dict[str, Parameter]:
    """Which checkpoint tensors fill which parameter of this rank."""
    shard, prefix = Sharding(tp), layout.prefix
    table = vocabulary_table(prefix, config, shard, head=layout.head)
    table["norm"] = shard.whole(f"{prefix}norm.weight", config.hidden_size)
    for i in range(config.num_layers):
        table |= _layer_table(f"{i}.", f"{prefix}layers.{i}.", config, shard)
    return table


def _layer_table(to: str, at: str, config: ModelConfig, shard: Sharding) -> dict[str, Parameter]:
    width, head_dim = config.hidden_size, config.head_dim
    q = shard.part(config.num_heads, head_dim)
    kv = shard.part(config.num_kv_heads, head_dim)
    inner = config.intermediate_size
    qkv = [(f"{at}self_attn.{name}_proj", part) for name, part in (("q", q), ("k", kv), ("v", kv))]
    table = {
        f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
        f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
        **shard.columns(f"{to}qkv", qkv, width, bias=config.qkv_bias),
        **shard.rows(f"{to}o", f"{at}self_attn.o_proj", width, q, bias=config.o_bias),
        **mlp_table(to, f"{at}mlp.", width, inner, shard, bias=config.mlp_bias),
    }
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            table[to + name] = shard.whole(f"{at}self_attn.{name}.weight", head_dim)
    return table


def take_layer(
    to: str,
    config: ModelConfig,
    tp: TensorParallel,
    weights: Weights,
    kernels: KernelSet,
    rotary: Tensor,
) -> Layer:
    """Read one layer, packing each weight before the next is read; rotary is f32[P, D]."""

    def vector(name: str) -> Tensor | None:
        return weights.take(to + name, torch.float32) if to + name in weights else None

    return Layer(
        input_norm=weights.take(to + "input_norm", torch.float32),
        qkv=HeadProjection(
            packed=take_linear(weights, to + "qkv", kernels),
            head_dim=config.head_dim,
            num_heads=config.num_heads // tp.size,
            num_others=0,
            num_kv_heads=max(1, config.num_kv_heads // tp.size),
            cos_sin=rotary,
            q_norm=vector("q_norm"),
            k_norm=vector("k_norm"),
            eps=config.rms_norm_eps,
        ),
        o=take_linear(weights, to + "o", kernels),
        post_norm=weights.take(to + "post_norm", torch.float32),
        mlp=GatedMlp(to, weights, kernels),
    )
