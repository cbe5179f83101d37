"""Writes a checkpoint of a published model's shape with random weights, for timing alone.

python tools/make_shaped_checkpoint.py llama-3.2-1b FOLDER
python tools/make_shaped_checkpoint.py qwen3.5-4b FOLDER --device cuda    # draws weights there
python tools/make_shaped_checkpoint.py qwen3-0.6b FOLDER --tokenizer MODEL-FOLDER

Hybrids get an MTP head too. Billions of numbers take a while to draw on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig


class Shape(NamedTuple):
    """Shape of a model: its kind of configuration, and its values."""

    config: type[Any]
    sizes: dict[str, Any]
    mtp: bool = False


# Published: vocabulary, hidden and MLP width, 32 layers of which every fourth is full attention,
# numbers of attention heads and their width, context, base of the rotary embedding, one MTP layer.
# Tied embeddings follow from the published 4.5 billion parameters, vision tower included. Assumed,
# being the defaults of transformers' Qwen3_5TextConfig: heads of the gated delta rule and their
# width, the convolution of 4, epsilon, the rotated quarter. Sections do not matter to text.
_QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}
SHAPES: dict[str, Shape] = {
    "llama-3.2-1b": Shape(
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": Shape(
        Qwen3Config,
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    # Latents, index keys and heads as those of GLM-5, in a model that is small otherwise.
    "glm-5-attention": Shape(
        GlmMoeDsaConfig,
        {
            "vocab_size": 512,
            "hidden_size": 512,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "q_lora_rank": 256,
        },
    ),
    "qwen3.5-4b": Shape(Qwen3_5TextConfig, _QWEN35_4B, mtp=True),
    "tiny-llama": Shape(
        LlamaConfig,
        {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "tiny-qwen3.5": Shape(
        Qwen3_5TextConfig,
        _QWEN35_4B
        | {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": _QWEN35_4B["rope_parameters"] | {"mrope_section": [2, 1, 1]},
        },
        mtp=True,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where weights are drawn")
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is put beside it")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    make(shape, args.folder, args.device)
    if args.tokenizer is not None:
        add_tokenizer(args.tokenizer, args.folder, shape.sizes["vocab_size"])


def make(shape: Shape, folder: Path, device: str = "cpu") -> None:
    """Write a checkpoint of bfloat16 weights to `folder`."""
    torch.manual_seed(0)
    config = shape.config(**shape.sizes, bos_token_id=1, eos_token_id=2)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if shape.mtp:
        _add_mtp(folder, shape.sizes["num_hidden_layers"] - 1, shape.sizes["hidden_size"])


def add_tokenizer(source: Path, folder: Path, size: int) -> None:
    """Copy a BPE tokenizer, with a word of its own for each token of `size` that it lacks.

    Random weights choose any of them, and servers send nothing for a token without a text.
    """
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    if max(known) >= size:
        raise SystemExit(f"{source} has more than {size} tokens")
    vocab |= {f"_{token}": token for token in range(size) if token not in known}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def _add_mtp(folder: Path, last: int, width: int) -> None:
    """An MTP head in a file of its own, whose layer has the shapes of layer `last`."""
    held = dict[str, tuple[str, Sequence[int]]]()
    head = {"mtp.fc.weight": _random(width, 2 * width)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = _random(width)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            held |= {name: (path.name, file.get_slice(name).get_shape()) for name in names}
    for name, (_, size) in held.items():
        _, of_last, rest = name.partition(f"model.layers.{last}.")
        if of_last:
            head[f"mtp.layers.0.{rest}"] = _random(*size)
    save_file(head, folder / "mtp.safetensors", metadata={"format": "pt"})
    _write_index(folder, {name: file for name, (file, _) in held.items()}, head)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 1}))


def _random(*size: int) -> Tensor:
    return 0.02 * torch.randn(size, dtype=torch.bfloat16)


def _write_index(folder: Path, held: Mapping[str, str], head: Mapping[str, Tensor]) -> None:
    files = dict(held) | dict.fromkeys(head, "mtp.safetensors")
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
