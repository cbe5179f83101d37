"""GGUF files of tiny checkpoints, written by llama.cpp's own library, and plain copies that hold
exactly the weights which the files stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file
from support.checkpoints.quantize import Twins
from surestep_common.gguf import model_folder, whole_name
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, TokenizersBackend

TypeOf = Callable[[str], Type]  # of a tensor, by its Hugging Face name
_HALVES = {  # offsets of the numbers in float16 within a block
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}
BLOCKS = tuple(_HALVES)
_EXPERT = re.compile(r"(model\.layers\.\d+)\.\w+\.experts\.\d+\.(\w+)\.weight")
_OF_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}  # by type of model, where they differ
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4


def random_blocks(kind: Type, rows: int, columns: int, seed: int, size: float = 1.0) -> Any:
    """Bytes u8[R, B] of a matrix of any codes and scales; its elements are about as large as `size`."""
    random = np.random.default_rng(seed)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    largest = 512 if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K) else 16
    for at in _HALVES[kind]:
        halves = random.standard_normal(blocks.shape[:2]) * size / largest
        blocks[..., at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    source: Path,
    file: Path,
    type_of: TypeOf,
    *,
    tensors: dict[str, Any] | None = None,
    part: int = 0,
    **metadata: Any,
) -> Twins:
    """Write a model as a GGUF file, and a plain copy of `source` beside it.

    Matrices get the types of `type_of`; those that the library cannot make are random. The first
    folder returned is the file's own, changed to compute in float32. Further `tensors` are added as
    they are. With `part`, so many tensors
    are in a file, and none in the first. Further `metadata` replaces what the file says, None
    removes it.
    """
    config = json.loads((source / "config.json").read_text())
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    plain = file.with_name(f"{file.stem}-plain")
    shutil.copytree(source, plain, ignore=shutil.ignore_patterns("*.index.json"))
    writer = GGUFWriter(file, arch, split_max_tensors=part, small_first_shard=part > 0)
    written = _metadata(config, arch) | _tokenizer(source, config["vocab_size"]) | metadata
    for key, value in written.items():
        _add(writer, key, value)
    meant, experts = {}, dict[tuple[str, Type], list[Any]]()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for seed, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        kind = type_of(name) if tensor.dim() > 1 else Type.F32
        data, meaning = _stored(tensor.float().numpy(), kind, seed)
        heads = _interleaved(name, config) if arch in ("llama", "granite") else 0
        meant[name] = torch.from_numpy(meaning)
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + 1.0
        if expert := _EXPERT.fullmatch(name):
            layer, matrix = expert.groups()
            of_all = f"{layer}.mlp.experts.{_OF_EXPERTS.get(matrix, matrix)}.weight"
            experts.setdefault((of_all, kind), []).append(data)
            continue
        data = _permuted(data, heads) if heads else data
        writer.add_tensor(_known(names, name), data, raw_dtype=kind)
    for (name, kind), each in experts.items():
        writer.add_tensor(_known(names, name), np.stack(each), raw_dtype=kind)
    for name, factors in (_long_factors(config) | (tensors or {})).items():
        writer.add_tensor(name, factors)
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, write)()
    writer.close()
    if part:
        file = min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))
    save_file(meant, plain / "model.safetensors")
    return Twins(_in_float32(file), plain)


def _long_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Phi-3's divisors of frequencies, as tensors."""
    rope, ends = config["rope_parameters"], ("short", "long")
    return {
        f"rope_factors_{end}.weight": np.array(rope[f"{end}_factor"], dtype=np.float32)
        for end in ends
        if f"{end}_factor" in rope
    }


def _known(names: gguf.TensorNameMap, name: str) -> str:
    known = names.get_name(name, (".weight", ".bias"))
    assert known is not None, name
    return known


def _stored(values: Any, kind: Type, seed: int) -> tuple[Any, Any]:
    """What the file holds of a tensor, and what that means."""
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        data = random_blocks(kind, len(values), values.shape[1], seed)
    else:
        data = gguf.quantize(values, kind)
    meaning = gguf.dequantize(data, kind).astype(np.float32).reshape(values.shape)
    return data, np.ascontiguousarray(meaning)


def _interleaved(name: str, config: Mapping[str, Any]) -> int:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    return int(config[heads[part]]) if part in heads else 0


def _permuted(data: Any, heads: int) -> Any:
    """Rows as llama.cpp has those of queries and keys: the halves of each head interleaved."""
    halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)


def _metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    about = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": _rope(config)["rope_theta"],
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if arch == "gemma3":
        about |= {
            "attention.sliding_window": config["sliding_window"],
            "final_logit_softcapping": config["final_logit_softcapping"],
        }
    if arch == "granite":
        about |= {
            "embedding_scale": config["embedding_multiplier"],
            "attention.scale": config["attention_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if arch == "phi3":
        rope = config["rope_parameters"]
        about |= {
            "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
            "rope.scaling.original_context_length": config["original_max_position_embeddings"],
            "rope.scaling.attn_factor": rope.get("attention_factor"),
            "attention.sliding_window": config["sliding_window"] or 0,
        }
    return {f"{arch}.{key}": value for key, value in about.items()}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config["rope_parameters"]
    kinds: Mapping[str, Any] = rope.get("full_attention", rope)
    return kinds


def _tokenizer(source: Path, vocab_size: int) -> dict[str, Any]:
    """As converters write it; without a tokenizer in the folder one of meaningless tokens."""
    about: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "eos_token_id": 2}
    path = source / "tokenizer.json"
    if path.is_file():
        spec = json.loads(path.read_text())
        tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
        about["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
        special = {token["content"] for token in spec["added_tokens"]}
    else:
        tokens, special = [], set()
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    about |= {"tokens": tokens, "token_type": [CONTROL if t in special else NORMAL for t in tokens]}
    named = {f"tokenizer.ggml.{key}": value for key, value in about.items()}
    template = source / "chat_template.jinja"
    return named | ({"tokenizer.chat_template": template.read_text()} if template.is_file() else {})


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _in_float32(file: Path) -> Path:
    folder = file.with_name(f"{whole_name(file)}-folder")
    shutil.copytree(model_folder(file), folder, symlinks=True)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    return folder


def transformers_tokenizer(path: Path) -> TokenizersBackend:
    """A file's tokenizer as transformers makes it, except for what that gets wrong.

    transformers 5.23 takes `smollm` for GPT-2, whose split alone would cut `"  12"` elsewhere.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert isinstance(tokenizer, TokenizersBackend)
    kind = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
