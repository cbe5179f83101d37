"""Tiny EAGLE-3 heads, in each of the forms that heads are published in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.references.eagle3 import Eagle3Reference
from torch import Tensor
from transformers import AutoConfig

FORMS = ("safeailab", "specforge", "modelopt", "speculators")


def layer_config(model: Path, **changes: Any) -> dict[str, Any]:
    """Of a layer that is as wide as the model's hidden states."""
    raw = json.loads((model / "config.json").read_text())
    raw = raw.get("text_config", raw)
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        **changes,
    }


def make_reference(
    model: Path,
    *,
    kind: str = "llama",
    num_captured: int = 3,
    draft_vocab: int | None = None,
    seed: int = 3,
    scale: float = 0.2,
    layer: dict[str, Any] | None = None,
    window: int | None = None,
    mask_id: int | None = None,
    **flags: bool,
) -> Eagle3Reference:
    """A head of random weights for the model in a folder; norms are random, too."""
    config = layer_config(model, **(layer or {}))
    width = AutoConfig.from_pretrained(model).get_text_config().hidden_size
    torch.manual_seed(seed)
    head = Eagle3Reference(
        config,
        width,
        num_captured,
        kind=kind,
        draft_vocab=draft_vocab or config["vocab_size"],
        window=window,
        mask_id=mask_id,
        **flags,
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(
                1.0 if name.endswith("norm.weight") or ".fc_norm" in name else 0.0, scale
            )
    return head


def save_head(
    folder: Path,
    head: Eagle3Reference,
    *,
    form: str = "safeailab",
    token_ids: Tensor | None = None,
    layer_ids: Sequence[int] | None = None,
    embedding: Tensor | None = None,
    own_rows: bool = True,
    **changes: Any,
) -> Path:
    """Write a head as `form` does; `layer_ids` count the layers before what is read.

    `token_ids` are the model's ids of the draft vocabulary; `embedding` is the head's own. Without
    `own_rows` its output head is left out: it is rows of the model's.
    `changes` are made to config.json, where None takes a field out.
    """
    assert form in FORMS
    folder.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[form](head, layer_ids) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in head.state_dict().items()
        if "inv_freq" not in name
    }
    if form in ("safeailab", "specforge"):
        tensors = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    drafted, vocab = len(tensors["lm_head.weight"]), head.config.vocab_size
    if not own_rows or (token_ids is None and drafted == vocab and form == "modelopt"):
        del tensors["lm_head.weight"]  # shared with the model
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(drafted)
        if form != "modelopt":
            tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(
                0, token_ids, value=True
            )
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(head: Eagle3Reference) -> dict[str, Any]:
    config = head.config
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "hidden_act", "attention_bias"),
    )
    values = {key: getattr(config, key) for key in keys}
    windows = (
        {}
        if head.window is None
        else {
            "sliding_window": head.window,
            "layer_types": ["sliding_attention"] * config.num_hidden_layers,
        }
    )
    return values | windows | {"rope_theta": config.rope_parameters["rope_theta"]}


def _flat(head: Eagle3Reference) -> dict[str, Any]:
    qwen = head.config.model_type == "qwen3"
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": head.lm_head.out_features,
        "tie_word_embeddings": False,
        **_layer(head),
        **{name: True for name, value in head.flags.items() if value},
    }


def _safeailab(head: Eagle3Reference, layer_ids: Sequence[int] | None) -> dict[str, Any]:
    """With the numbers at the top level, or none."""
    return _flat(head) | (
        {"eagle_aux_hidden_state_layer_ids": list(layer_ids)} if layer_ids else {}
    )


def _nested(head: Eagle3Reference, layer_ids: Sequence[int] | None) -> dict[str, Any]:
    """Of ModelOpt and SpecForge: the numbers are those of the layers whose outputs are read."""
    about: dict[str, Any] = {"use_aux_hidden_state": True, "use_last_layernorm": True}
    if layer_ids:
        about["eagle_aux_hidden_state_layer_ids"] = [j - 1 for j in layer_ids]
    return _flat(head) | {"eagle_config": about}


def _speculators(head: Eagle3Reference, layer_ids: Sequence[int] | None) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {"model_type": head.config.model_type, **_layer(head)},
        "draft_vocab_size": head.lm_head.out_features,
        **head.flags,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(layer_ids) if layer_ids else None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
    }


_CONFIGS = {
    "safeailab": _safeailab,
    "specforge": _nested,
    "modelopt": _nested,
    "speculators": _speculators,
}
