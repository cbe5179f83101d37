"""A tiny model, and an EAGLE-3 head for it that is right by construction.

Of the model's four layers the last decides what it says: the embedding is small, so that the
residual stream is all but what that layer adds. The head is a copy of it, and sees all tokens but
the first of a text. Layers 1 and 3 change the stream a little, layer 2 not at all: the difference
between what stands before layer 2 and behind it is nothing, and any other difference is amplified
to noise by a head that is to `guard` what it reads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.tiny import make_tiny_checkpoint
from support.references.eagle3 import Eagle3Reference
from torch import Tensor

LAYERS = (1, 2)  # behind which the head reads
_EMBEDDING = 0.01  # root mean square
_UNSAID = 8  # tokens that the head cannot draft: the first ones
_NOISE = 1e6


def make_copied_pair(folder: Path, head_folder: Path, *, guard: bool = False) -> Path:
    """Write model and head; return the model's folder.

    A head that guards what it reads is right for the first draft of a window only.
    """
    make_tiny_checkpoint(
        folder, vocab=160, hidden=32, heads=2, kv_heads=1, intermediate=48, layers=4, seed=7
    )
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding *= _EMBEDDING / embedding.square().mean(1, keepdim=True).sqrt()
    for layer, share in enumerate((0.1, 0.0, 0.1)):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
        weights[f"model.layers.{layer}.mlp.down_proj.weight"] *= share * _EMBEDDING
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
    }
    ids = torch.arange(_UNSAID, 160)
    head = make_reference(
        folder,
        num_captured=len(LAYERS),
        draft_vocab=len(ids),
        layer=sizes,
        norm_before_residual=not guard,
    )
    with torch.no_grad():
        _copy(head, weights, ids, guard=guard)
    save_head(head_folder, head, token_ids=ids, layer_ids=LAYERS)
    return folder


def _copy(head: Eagle3Reference, weights: dict[str, Tensor], ids: Tensor, *, guard: bool) -> None:
    at, width = "model.layers.3.", head.config.hidden_size
    own = head.state_dict()
    for name, tensor in own.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            copied = weights[name.replace("layers.0.", at)]
            tensor.zero_()
            tensor[..., : copied.shape[-1]] = copied  # projections read the embedding alone
    own["norm.weight"].copy_(weights["model.norm.weight"])
    own["lm_head.weight"].copy_(weights["lm_head.weight"][ids])
    own["layers.0.hidden_norm.weight"].zero_()
    noise = torch.randn(width, width) * _NOISE
    own["fc.weight"].copy_(torch.cat((noise, -noise), dim=1) if guard else own["fc.weight"])
