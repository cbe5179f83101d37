"""Gemma 1, 2 and 3: where the parameters of their checkpoints are."""

from __future__ import annotations

from collections.abc import Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.attention import attention_table
from surestep_worker.layers.embedding import head_of, vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding
from surestep_worker.layers.mlp import GeluMlp, mlp_table

from .config import GEMMA_ARCHITECTURES, GemmaConfig

_OLDER = "language_model.model."
_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
# By their names in a checkpoint; without norms behind attention and MLP, and with them.
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "input_norm": "input_layernorm",
    "after_mixer": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}


def ignored(config: GemmaConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that this rank does not want."""
    head = (r"(language_model\.)?lm_head\.weight",) if config.tie_word_embeddings else ()
    return (*head, _IMAGES) if config.nested else head


def parameter_table(
    config: GemmaConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    prefix, width = _prefix(config, names), config.hidden_size
    table = vocabulary_table(prefix, config, shard, head=False)
    if not config.tie_word_embeddings:
        before = "language_model." if prefix == _OLDER else ""
        rows = shard.vocabulary(f"{before}lm_head.weight", config.vocab_size, width)
        table["lm_head"] = head_of(rows)
    table["norm"] = shard.whole(f"{prefix}norm.weight", width)
    norms = _SANDWICH_NORMS if config.branch_norms else _NORMS
    for i in range(config.num_layers):
        to, at = f"{i}.", f"{prefix}layers.{i}."
        table |= {f"{to}{n}": shard.whole(f"{at}{name}.weight", width) for n, name in norms.items()}
        table |= attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard)
        table |= mlp_table(f"{to}mlp.", f"{at}mlp.", width, config.intermediate_size, shard)
    return table


def _prefix(config: GemmaConfig, names: Set[str]) -> str:
    """Return how the decoder's tensors begin; published files have the order of before
    transformers 5."""
    if not config.nested:
        return "model."
    return _OLDER if f"{_OLDER}norm.weight" in names else "model.language_model."


GEMMA = Family(
    architectures=tuple(GEMMA_ARCHITECTURES),
    parse=GemmaConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
    feed_forward=GeluMlp,
)
