"""Qwen3-Next and Qwen3.5: where the parameters of their checkpoints are, MTP heads included."""

from __future__ import annotations

import re
from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.configs.model_config import FULL_ATTENTION
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.gated_delta_net import delta_net_table
from surestep_worker.layers.linear import Sharding, ShardSlice
from surestep_worker.layers.mlp import mlp_table
from surestep_worker.layers.moe import dense_or_sparse, experts_elsewhere, moe_table

from .config import HYBRID_ARCHITECTURES, HybridConfig

_VISION = r"(model\.)?visual\..*"
_DRAFT_HEAD = "mtp."


def ignored(config: HybridConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that this rank does not want."""
    patterns = [_VISION] if config.traits.nested else []
    if config.moe is not None:
        patterns.append(experts_elsewhere(config.moe.num_experts, shard))
    if not draft_head:
        patterns.append(rf"{re.escape(_DRAFT_HEAD)}.*")
    if config.tie_word_embeddings:
        patterns.append(r"lm_head\.weight")
    return tuple(patterns)


def parameter_table(
    config: HybridConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors fill which parameter of this rank.

    `names` are those of the checkpoint: they tell in which form it keeps what.
    """
    prefix = config.traits.prefix
    table = vocabulary_table(prefix, config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole(f"{prefix}norm.weight", config.hidden_size)
    for i, kind in enumerate(config.layer_types):
        at = f"{prefix}layers.{i}."
        if kind == FULL_ATTENTION:
            table |= attention_table(f"{i}.mixer.", f"{at}self_attn.", config, shard)
        else:
            table |= delta_net_table(f"{i}.mixer.", f"{at}linear_attn.", config, shard, names)
        routed = config.moe is not None and i not in config.dense_layers
        table |= _rest_of_layer(f"{i}.", at, config, shard, names, routed=routed)
    return table | _mtp_table(config, shard, names) if draft_head else table


def _rest_of_layer(
    to: str, at: str, config: HybridConfig, shard: Sharding, names: Set[str], *, routed: bool
) -> dict[str, Parameter]:
    width = config.hidden_size
    norms = {
        f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
        f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
    }
    if not routed:
        inner = config.intermediate_size
        return norms | mlp_table(f"{to}mlp.", f"{at}mlp.", width, inner, shard)
    return norms | moe_table(f"{to}mlp.", f"{at}mlp.", config, shard, names)


def _mtp_table(config: HybridConfig, shard: Sharding, names: Set[str]) -> dict[str, Parameter]:
    width, at = config.hidden_size, "mtp.layers.0."
    whole = [("mtp.fc", ShardSlice(width, slice(0, width)))]
    return {
        **shard.columns("mtp.fc", whole, 2 * width, bias=False),
        "mtp.norm_embedding": shard.whole("mtp.pre_fc_norm_embedding.weight", width),
        "mtp.norm_hidden": shard.whole("mtp.pre_fc_norm_hidden.weight", width),
        "mtp.norm": shard.whole("mtp.norm.weight", width),
        **attention_table("mtp.mixer.", f"{at}self_attn.", config, shard),
        **_rest_of_layer("mtp.", at, config, shard, names, routed=config.moe is not None),
    }


HYBRID = Family(
    architectures=tuple(HYBRID_ARCHITECTURES),
    parse=HybridConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
    feed_forward=dense_or_sparse,
    draft_head=_DRAFT_HEAD,
)
