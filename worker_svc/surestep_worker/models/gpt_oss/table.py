"""gpt-oss: where the parameters of its checkpoints are."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.moe import GptOssMoe, gpt_oss_moe_table

from .config import GptOssConfig


def parameter_table(
    config: GptOssConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    prefix, width = "model.", config.hidden_size
    table = vocabulary_table(prefix, config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole(f"{prefix}norm.weight", width)
    for i in range(config.num_layers):
        to, at = f"{i}.", f"{prefix}layers.{i}."
        table |= {
            f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
            f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
            **attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard),
            **gpt_oss_moe_table(f"{to}mlp.", f"{at}mlp.", config, shard, names),
        }
    return table


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    parse=GptOssConfig.parse,
    parameter_table=parameter_table,
    feed_forward=GptOssMoe,
)
