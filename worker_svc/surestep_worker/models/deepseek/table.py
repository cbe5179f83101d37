"""DeepSeek-V3, V3.2, GLM-5, GLM-4.7-Flash and GLM-4.5: where the parameters of their checkpoints
are, with the layer behind the last one, which is the MTP head."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import head_of, vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.latent_attention import latent_attention_table
from surestep_worker.layers.linear import Sharding, ShardSlice
from surestep_worker.layers.mlp import mlp_table
from surestep_worker.layers.moe import dense_or_sparse, experts_elsewhere, moe_table

from .config import DEEPSEEK_ARCHITECTURES, DeepseekConfig

_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def ignored(config: DeepseekConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that this rank does not want."""
    assert config.moe is not None
    patterns = [_BUFFERS, experts_elsewhere(config.moe.num_experts, shard)]
    if not draft_head:
        patterns.append(rf"model\.layers\.{config.num_layers}\..*")
    if config.tie_word_embeddings:
        patterns.append(r"lm_head\.weight")
    return tuple(patterns)


def parameter_table(
    config: DeepseekConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    table = vocabulary_table("model.", config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole("model.norm.weight", config.hidden_size)
    for i in range(config.num_layers):
        table |= _layer_table(f"{i}.", i, config, shard, names)
    return table | _mtp_table(config, shard, names) if draft_head else table


def _layer_table(
    to: str, layer: int, config: DeepseekConfig, shard: Sharding, names: Set[str]
) -> dict[str, Parameter]:
    width, at = config.hidden_size, f"model.layers.{layer}."
    table = {
        f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
        f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
    }
    mixer, mlp = (f"{to}mixer.", f"{at}self_attn."), (f"{to}mlp.", f"{at}mlp.")
    if config.latent is None:
        table |= attention_table(*mixer, config, shard)
    else:
        indexer = config.has_indexer(layer)
        table |= latent_attention_table(*mixer, config, shard, indexer=indexer)
    if layer in config.dense_layers:
        return table | mlp_table(*mlp, width, config.intermediate_size, shard)
    return table | moe_table(*mlp, config, shard, names)


def _mtp_table(config: DeepseekConfig, shard: Sharding, names: Set[str]) -> dict[str, Parameter]:
    width, layer = config.hidden_size, config.num_layers
    at, whole = f"model.layers.{layer}.", ShardSlice(width, slice(0, width))
    own = dict[str, Parameter]()  # copies of the model's, which some checkpoints have
    vocabulary = config.vocab_size, width
    if (name := f"{at}embed_tokens.weight") in names:
        own["mtp.embedding"] = shard.vocabulary(name, *vocabulary)._replace(table=True)
    if (name := f"{at}shared_head.head.weight") in names:
        own["mtp.lm_head"] = head_of(shard.vocabulary(name, *vocabulary))
    return own | {
        **shard.columns("mtp.fc", [(f"{at}eh_proj", whole)], 2 * width, bias=False),
        "mtp.norm_embedding": shard.whole(f"{at}enorm.weight", width),
        "mtp.norm_hidden": shard.whole(f"{at}hnorm.weight", width),
        "mtp.norm": shard.whole(f"{at}shared_head.norm.weight", width),
        **_layer_table("mtp.", layer, config, shard, names),
    }


DEEPSEEK = Family(
    architectures=tuple(DEEPSEEK_ARCHITECTURES),
    parse=DeepseekConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
    feed_forward=dense_or_sparse,
    draft_head="model.layers.{layers}.",
)
