"""Reference of the MTP layer of DeepSeek-V3 and GLM: transformers' model of that layer alone.

Row i of the target has read tokens 0..i; its normed hidden state joins token i + 1 at position i:
`eh_proj cat(enorm(embed(token)), hnorm(hidden))`, the first part 0 at position 0. A further draft
adds a row that joins the layer's own normed output with the token that was drafted.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

_ALONE = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "indexer_types": None,
    "layer_types": None,
}


class MtpLayer:
    """The MTP layer of the checkpoint in `folder`, whose own copy of the layer goes to `scratch`."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        own = f"model.layers.{config['num_hidden_layers']}."
        self._weights = {
            name.removeprefix(own): tensor
            for name, tensor in tensors.items()
            if name.startswith(own)
        }
        alone = {name: t for name, t in tensors.items() if not name.startswith("model.layers.")}
        alone["model.norm.weight"] = self._weights["shared_head.norm.weight"]
        alone["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        for name, tensor in self._weights.items():
            if name.startswith(("self_attn", "mlp", "input_", "post_")):
                alone[f"model.layers.0.{name}"] = tensor
        self._embedding = self._weights.get(
            "embed_tokens.weight", tensors["model.embed_tokens.weight"]
        )
        alone["lm_head.weight"] = self._weights.get(
            "shared_head.head.weight", tensors["lm_head.weight"]
        )
        scratch.mkdir()
        (scratch / "config.json").write_text(json.dumps(config | _ALONE))
        save_file(alone, scratch / "model.safetensors", metadata={"format": "pt"})
        self._layer = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, experts_implementation="eager"
        )
        self._eps = float(config["rms_norm_eps"])

    @torch.no_grad()
    def draft(self, known: list[int], hidden: Tensor, count: int) -> list[int]:
        """Draft `count` tokens behind n known ones; hidden [n - 1, H] is the target's."""
        tokens, states, drafts = known[1:], hidden, list[int]()
        for _ in range(count):
            embedded = self._norm(self._embedding[tokens], "enorm")
            embedded[0] = 0
            joined = torch.cat((embedded, self._norm(states, "hnorm")), dim=1)
            rows = linear(joined, self._weights["eh_proj.weight"])
            made = self._layer(inputs_embeds=rows[None], output_hidden_states=True)
            drafts.append(int(made.logits[0, -1].argmax()))
            tokens, states = (
                [*tokens, drafts[-1]],
                torch.cat((states, made.hidden_states[-1][0, -1:])),
            )
        return drafts

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps) * weight
