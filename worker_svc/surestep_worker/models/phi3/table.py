"""Phi-3 and Phi-4: where the parameters of their checkpoints are."""

from __future__ import annotations

from collections.abc import Iterable, Set

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.embedding import vocabulary_table
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import Sharding, ShardSlice

from .config import Phi3Config


def parameter_table(
    config: Phi3Config, shard: Sharding, names: Set[str], *, draft_head: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    width = config.hidden_size
    table = vocabulary_table("model.", config, shard, head=not config.tie_word_embeddings)
    table["norm"] = shard.whole("model.norm.weight", width)
    for i in range(config.num_layers):
        to, at = f"{i}.", f"model.layers.{i}."
        table |= {
            f"{to}input_norm": shard.whole(f"{at}input_layernorm.weight", width),
            f"{to}post_norm": shard.whole(f"{at}post_attention_layernorm.weight", width),
            **_attention_table(f"{to}mixer.", f"{at}self_attn.", config, shard),
            **_mlp_table(f"{to}mlp.", f"{at}mlp.", config, shard),
        }
    return table


def _attention_table(to: str, at: str, config: Phi3Config, shard: Sharding) -> dict[str, Parameter]:
    width, dim = config.hidden_size, config.head_dim
    heads, kv = shard.part(config.num_heads, dim), shard.part(config.num_kv_heads, dim)
    joined = _joined(f"{at}qkv_proj", (heads, kv, kv))
    return {
        **shard.columns(f"{to}qkv", joined, width, bias=False),
        **shard.rows(f"{to}o", f"{at}o_proj", width, heads, bias=False),
    }


def _mlp_table(to: str, at: str, config: Phi3Config, shard: Sharding) -> dict[str, Parameter]:
    width, inner = config.hidden_size, shard.part(config.intermediate_size)
    joined = _joined(f"{at}gate_up_proj", (inner, inner))
    return {
        **shard.columns(f"{to}gate_up", joined, width, bias=False),
        **shard.rows(f"{to}down", f"{at}down_proj", width, inner, bias=False),
    }


def _joined(name: str, parts: Iterable[ShardSlice]) -> list[tuple[str, ShardSlice]]:
    """Return the parts of projections whose outputs follow each other in one tensor."""
    parts = list(parts)
    total, begin, found = sum(part.total for part in parts), 0, list[tuple[str, ShardSlice]]()
    for whole, keep in parts:
        found.append((name, ShardSlice(total, slice(begin + keep.start, begin + keep.stop))))
        begin += whole
    return found


PHI3 = Family(
    architectures=("Phi3ForCausalLM",),
    parse=Phi3Config.parse,
    parameter_table=parameter_table,
)
