"""Qwen2-MoE, Qwen3-MoE and Mixtral: where the parameters of their checkpoints are."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.mlp import mlp_table
from surestep_worker.layers.moe import dense_or_sparse, experts_elsewhere, moe_table

from .config import MOE_ARCHITECTURES, RoutedDecoderConfig

_MIXTRAL = "block_sparse_moe."  # begins the names of a published layer's experts


def ignored(config: RoutedDecoderConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that this rank does not want."""
    assert config.moe is not None
    elsewhere = experts_elsewhere(config.moe.num_experts, shard)
    return (elsewhere, r"lm_head\.weight") if config.tie_word_embeddings else (elsewhere,)


def parameter_table(
    config: RoutedDecoderConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors fill which parameter of this rank.

    `names` are those of the checkpoint: they tell in which form it keeps experts.
    """
    width = config.hidden_size
    table = vocabulary_table("model.", config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole("model.norm.weight", width)
    block = _MIXTRAL if any(f".{_MIXTRAL}" in name for name in names) else "mlp."
    for i in range(config.num_layers):
        to, at = f"{i}.", f"model.layers.{i}."
        table |= {
            f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
            f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
            **attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard),
        }
        if i in config.dense_layers:
            inner = config.intermediate_size
            table |= mlp_table(f"{to}mlp.", f"{at}mlp.", width, inner, shard)
        else:
            table |= moe_table(f"{to}mlp.", f"{at}{block}", config, shard, names)
    return table


SPARSE = Family(
    architectures=tuple(MOE_ARCHITECTURES),
    parse=RoutedDecoderConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
    feed_forward=dense_or_sparse,
)
