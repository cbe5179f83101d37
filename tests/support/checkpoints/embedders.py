"""Tiny embedding checkpoints, as sentence-transformers lays them out, and their vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import SPECIAL_TOKENS, make_tiny_checkpoint
from tokenizers import Tokenizer, processors
from torch.nn.functional import normalize
from transformers import AutoModel

END = SPECIAL_TOKENS[0]  # stands behind every text, as in Qwen3-Embedding


def make_tiny_embedder(
    path: Path,
    *,
    architecture: str = "Qwen3ForCausalLM",
    mean: bool = False,
    family: str = "qwen3",
    **options: Any,
) -> Path:
    """Decoder without prefix and without an output head, pooling and a tokenizer that ends texts.

    Qwen3-Embedding names Qwen3ForCausalLM and has the tensors of a Qwen3Model.
    """
    make_tiny_checkpoint(path, family, tokenizer=True, **options)
    weights = load_file(path / "model.safetensors")
    bare = {n.removeprefix("model."): w for n, w in weights.items() if n != "lm_head.weight"}
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    write_modules(path, pooling_mode_mean_tokens=mean, pooling_mode_lasttoken=not mean)
    end_texts(path)
    return path


def write_modules(
    path: Path, extra: Sequence[str] = (), *, normalized: bool = True, **pooling: Any
) -> None:
    """modules.json and the configuration of its pooling."""
    kinds = ["Transformer", "Pooling", *extra, *(["Normalize"] if normalized else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    defaults = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(defaults | pooling))


def end_texts(path: Path) -> None:
    """Have the tokenizer put its end-of-text token behind every text."""
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(file)


def vectors_by_transformers(
    path: Path, prompts: Sequence[Sequence[int]], *, mean: bool
) -> torch.Tensor:
    """Normalised vectors f32[N, H], each of a prompt by itself."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for ids in prompts:
            hidden = model(torch.tensor([list(ids)])).last_hidden_state[0]
            vectors.append(hidden.mean(dim=0) if mean else hidden[-1])
    return normalize(torch.stack(vectors), dim=1)
