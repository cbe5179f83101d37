"""OLMo 2 and 3: where the parameters of their checkpoints are."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.mlp import mlp_table

from .config import OLMO2, OLMO3, OlmoConfig


def parameter_table(
    config: OlmoConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    prefix, width = "model.", config.hidden_size
    table = vocabulary_table(prefix, config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole(f"{prefix}norm.weight", width)
    for i in range(config.num_layers):
        to, at = f"{i}.", f"{prefix}layers.{i}."
        table |= {
            f"{to}after_mixer": shard.whole(f"{at}post_attention_layernorm.weight", width),
            f"{to}after_mlp": shard.whole(f"{at}post_feedforward_layernorm.weight", width),
            **attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard),
            **mlp_table(f"{to}mlp.", f"{at}mlp.", width, config.intermediate_size, shard),
        }
    return table


OLMO = Family(
    architectures=(OLMO2, OLMO3),
    parse=OlmoConfig.parse,
    parameter_table=parameter_table,
)
