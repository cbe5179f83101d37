"""The MTP layer of DeepSeek-V3 and GLM drafts what its definition says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.deepseek import make_tiny_deepseek
from support.parity.bench import Neighbours, build_runner, load
from support.parity.proposals import proposals
from support.references.deepseek_mtp import MtpLayer
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from transformers import AutoModelForCausalLM

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
