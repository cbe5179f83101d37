"""Llama and its likes (see config.py): where the parameters of their checkpoints are."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.mlp import mlp_table

from .config import BACKBONES, LLAMA_ARCHITECTURES, LlamaConfig

_BUFFERS = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def ignored(config: LlamaConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that hold nothing of their own."""
    headless = config.is_backbone or config.tie_word_embeddings
    return (*_BUFFERS, r"lm_head\.weight") if headless else _BUFFERS


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
    return table


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
