"""The tensors of a GGUF file by the names that they have in a Hugging Face checkpoint.

They are listed without torch, since a supervisor reads folders, too.
"""

from __future__ import annotations

import re
from pathlib import Path

from surestep_common.errors import InvalidRequest
from surestep_common.gguf.header import Header
from surestep_common.gguf.model_config import ROPE_FACTORS, architecture_of, head_counts
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
    heads = _interleaved_heads(header)
    entries = {}
    for name, place in header.tensors.items():
        if name == ROPE_FACTORS:  # a part of the configuration
            continue
        layer = _LAYER.fullmatch(name)
        part = layer[2] if layer else ""
        entry = Entry(place.file, place.type.name, place.shape, place.begin, place.nbytes)
        if part in heads:
            if not place.shape[0] or place.shape[0] % (2 * heads[part]):
                raise InvalidRequest(
                    f"cannot read {path}: {name} has {place.shape[0]} rows for {heads[part]} heads",
                    param="model",
                )
            entry = entry._replace(interleaved_heads=heads[part])
        entries[_renamed(name)] = entry
    return entries


def _renamed(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None or layer[2] not in _OF_LAYERS:
        return _OTHERS.get(name, name)
    return f"model.layers.{layer[1]}.{_OF_LAYERS[layer[2]]}.{layer[3]}"


def _interleaved_heads(header: Header) -> dict[str, int]:
    """Return the heads of the layers' parts whose rows are in another order than elsewhere.

    Converters write Llama's queries and keys for a rotation of neighbouring pairs.
    """
    if architecture_of(header) != "llama":
        return {}
    heads, kv_heads = head_counts(header)
    return {"attn_q": heads, "attn_k": kv_heads}
