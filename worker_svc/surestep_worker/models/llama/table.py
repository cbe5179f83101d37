"""Llama and its likes (see config.py): where the parameters of their checkpoints are."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding, ShardSlice
from surestep_worker.layers.mlp import mlp_table

from .config import BACKBONES, LLAMA_ARCHITECTURES, MIMO_ARCHITECTURE, LlamaConfig

_MTP = "model.mtp_layers."  # begins the names of MiMo's head
_BUFFERS = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def ignored(config: LlamaConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that hold nothing of their own."""
    patterns = [*_BUFFERS]
    if config.is_backbone or config.tie_word_embeddings:
        patterns.append(r"lm_head\.weight")
    if config.architecture == MIMO_ARCHITECTURE and not draft_head:
        patterns.append(rf"{re.escape(_MTP)}.*")
    return tuple(patterns)


def parameter_table(
    config: LlamaConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank.

    A decoder that was saved by itself, as embedding models are, has no prefix.
    """
    bare = "embed_tokens.weight" in names
    head = not (config.is_backbone or config.tie_word_embeddings)
    head = head and not (bare and "lm_head.weight" not in names)
    prefix, width = "" if bare else "model.", config.hidden_size
    table = vocabulary_table(prefix, config, shard, head=head)
    table["norm"] = shard.whole(f"{prefix}norm.weight", width)
    for i in range(config.num_layers):
        table |= layer_table(f"{i}.", f"{prefix}layers.{i}.", config, shard)
    return table | _mtp_table(config, shard) if draft_head else table


def _mtp_table(config: LlamaConfig, shard: Sharding) -> dict[str, Parameter]:
    width, at = config.hidden_size, f"{_MTP}0."
    whole = [(f"{at}input_proj", ShardSlice(width, slice(0, width)))]
    return {
        **shard.columns("mtp.fc", whole, 2 * width, bias=False),
        "mtp.norm_embedding": shard.whole(f"{at}token_layernorm.weight", width),
        "mtp.norm_hidden": shard.whole(f"{at}hidden_layernorm.weight", width),
        "mtp.norm": shard.whole(f"{at}final_layernorm.weight", width),
        **layer_table("mtp.", at, config, shard),
    }


def layer_table(
    to: str, at: str, config: LlamaConfig, shard: Sharding, inputs: int | None = None
) -> dict[str, Parameter]:
    """Return the parameters of the layer whose tensors begin with `at`.

    Its attention has as many `inputs` as the layer is wide, unless they are given.
    """
    width, inner = config.hidden_size, config.intermediate_size
    return {
        f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
        f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
        **attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard, inputs),
        **mlp_table(f"{to}mlp.", f"{at}mlp.", width, inner, shard, bias=config.mlp_bias),
    }


LLAMA = Family(
    architectures=(*LLAMA_ARCHITECTURES, *BACKBONES),
    parse=LlamaConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
)
MIMO = replace(LLAMA, architectures=(MIMO_ARCHITECTURE,), draft_head=_MTP)
