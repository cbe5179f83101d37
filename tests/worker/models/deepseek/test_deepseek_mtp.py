"""The MTP layer of DeepSeek-V3 and GLM drafts what its definition says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.parity.bench import Neighbours, build_runner, load
from support.parity.proposals import proposals
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
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


K = 3
WHERE = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)
TP = TensorParallel()


@torch.no_grad()
@pytest.mark.parametrize("own_vocabulary", [False, True])
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "glm4_moe"]
)
@pytest.mark.rotates(2)
def test_drafts_are_those_of_the_definition(
    family: str, own_vocabulary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_deepseek(tmp_path / "model", family, num_hidden_layers=2)
    if own_vocabulary:
        _add_own_vocabulary(folder)
    built = build_runner(load(folder, TP), TP, WHERE, "mtp", K)
    made, _ = proposals(built, monkeypatch)
    made = made[::5]
    assert len(made) > 20
    reference = MtpLayer(folder, tmp_path / "alone")
    target = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    wrong = 0
    for known, drafts in made:
        hidden = target.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        wrong += reference.draft(known, hidden, len(drafts)) != drafts
    assert wrong <= 1  # near ties between float32 computed in two ways


def _add_own_vocabulary(folder: Path) -> None:
    """The layer's own embedding and head, as DeepSeek-V3 has them; here other ones."""
    file = folder / "model.safetensors"
    tensors, at = load_file(file), "model.layers.2."
    shape = tensors["lm_head.weight"].shape
    tensors |= {
        at + name: torch.randn(shape) * 0.2
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_deepseek(tmp_path, mtp=False)
    options: dict[str, Any] = {"dtype": "auto", "device": "cpu", "tp": TP}
    with pytest.raises(InvalidRequest, match="no MTP head"):
        load_model(ModelSource(folder), kernels=load_kernels("cpu"), draft_head=True, **options)
