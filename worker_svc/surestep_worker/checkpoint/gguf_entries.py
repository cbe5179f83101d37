"""The tensors of a GGUF file by the names that they have in a Hugging Face checkpoint.

They are listed without torch, since a supervisor reads folders, too.
"""

from __future__ import annotations

import re
from pathlib import Path

from surestep_common.gguf.header import Header, refuse
from surestep_common.gguf.model_config import (
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    architecture_of,
    head_counts,
    num_experts,
)
from surestep_common.gguf.parts import read_whole

from .safetensors_header import Entry

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EACH = "{}"  # number of an expert: one tensor holds those of all
# Where a family has other names.
_OF_FAMILY = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "llama": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "gemma3": {  # norms behind attention and MLP, too
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "olmo2": {  # norms behind attention and MLP alone
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_OF_CONFIG = {"phi3": tuple(LONG_ROPE_FACTORS.values())}  # tensors that config.json was made of
_INTERLEAVED = ("llama", "granite")
_MAX_EXPERTS = 3 << 18  # tensors of single experts
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the tensors. Those that no model here has keep their names, to be refused by them.

    Raises InvalidRequest for a file that is damaged or not served.
    """
    header = read_whole(path)
    family, heads = architecture_of(header), _interleaved_heads(header)
    names = _OF_LAYERS | _OF_FAMILY.get(family, {})
    entries: dict[str, Entry] = {}
    for name, place in header.tensors.items():
        if name in _OF_CONFIG.get(family, (ROPE_FACTORS,)):
            continue
        layer = _LAYER.fullmatch(name)
        part = layer[2] if layer else ""
        entry = Entry(place.file, place.type.name, place.shape, place.begin, place.nbytes)
        if part in heads:
            if not place.shape[0] or place.shape[0] % (2 * heads[part]):
                refuse(path, f"{name} has {place.shape[0]} rows for {heads[part]} heads")
            entry = entry._replace(interleaved_heads=heads[part])
        if layer is None or part not in names:
            entries[_OTHERS.get(name, name)] = entry
            continue
        known = f"model.layers.{layer[1]}.{names[part]}.{layer[3]}"
        if _EACH not in known:
            entries[known] = entry
            continue
        for expert, one in enumerate(_experts(header, name, entry, len(entries))):
            entries[known.replace(_EACH, str(expert))] = one
    return entries


def _experts(header: Header, name: str, entry: Entry, before: int) -> list[Entry]:
    """Cut the tensor of all experts of a layer into one for each."""
    count, shape = num_experts(header), entry.shape
    if len(shape) != 3 or not count or shape[0] != count or before + count > _MAX_EXPERTS:
        refuse(header.path, f"{name} {list(shape)} does not go with {count} experts")
    size = entry.nbytes // count
    return [
        entry._replace(shape=shape[1:], begin=entry.begin + i * size, nbytes=size)
        for i in range(count)
    ]


def _interleaved_heads(header: Header) -> dict[str, int]:
    """Return the heads of the layers' parts whose rows are in another order than elsewhere.

    Converters write these families' queries and keys for a rotation of neighbouring pairs.
    """
    if architecture_of(header) not in _INTERLEAVED:
        return {}
    heads, kv_heads = head_counts(header)
    return {"attn_q": heads, "attn_k": kv_heads}
