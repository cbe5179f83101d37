"""The MTP heads of MiMo and Ernie 4.5 draft what their definitions say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.changes import change_config
from support.checkpoints.drafting import MTP_NAMES, make_tiny_mtp
from support.parity.bench import Neighbours, build_runner, load
from support.parity.proposals import proposals
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from transformers import Ernie4_5_MoeForCausalLM, Qwen2ForCausalLM

WHERE = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)
TP = TensorParallel()
MODELS: dict[str, Any] = {"mimo": Qwen2ForCausalLM, "ernie4_5_moe": Ernie4_5_MoeForCausalLM}


class MtpLayer:
    """The head of a checkpoint, by transformers' code of a model of one layer."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._weights, self._names = load_file(folder / "model.safetensors"), MTP_NAMES[kind]
        self._of_mimo = kind == "mimo"
        self._model: Any = MODELS[kind].from_pretrained(
            folder, dtype=torch.float32, num_hidden_layers=1
        )
        (layer,) = self._model.model.layers
        at = self._names.layer
        layer.load_state_dict({name: self._weights[at + name] for name in layer.state_dict()})
        self._model.model.norm.weight.data = self._weights[self._names.norm]

    @torch.no_grad()
    def draft(self, known: list[int], hidden: Tensor, count: int) -> list[int]:
        """Draft `count` tokens behind n known ones; hidden [n - 1, H] is what the model norms."""
        tokens, states, drafts = known[1:], hidden, list[int]()
        for _ in range(count):
            embedded = self._weights["model.embed_tokens.weight"][tokens]
            both = [self._norm(embedded, self._names.norm_embedding)]
            both.append(self._norm(states, self._names.norm_hidden))
            if self._of_mimo:
                both[0][0] = 0
                both.reverse()
            rows = linear(torch.cat(both, dim=1), self._weights[self._names.joins])
            made = self._model(inputs_embeds=rows[None], output_hidden_states=True)
            drafts.append(int(made.logits[0, -1].argmax()))
            tokens = [*tokens, drafts[-1]]
            states = torch.cat((states, made.hidden_states[-1][0, -1:]))
        return drafts

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return rms_norm(x, x.shape[-1:], self._weights[name], eps=eps)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_drafts_are_those_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = make_tiny_mtp(tmp_path, kind)
    made, _ = proposals(build_runner(load(folder, TP), TP, WHERE, "mtp", 3), monkeypatch)
    made = made[::5]
    assert len(made) > 20
    reference, target = MtpLayer(kind, folder), MODELS[kind].from_pretrained(folder)
    states = list[Tensor]()
    target.model.norm.register_forward_pre_hook(lambda norm, args: states.append(args[0][0]))
    wrong = 0
    for known, drafts in made:
        target(torch.tensor([known[:-1]]))
        wrong += reference.draft(known, states.pop(), len(drafts)) != drafts
    assert wrong <= 1  # near ties between float32 computed in two ways


@pytest.mark.parametrize("kind", MODELS)
def test_a_head_is_wanted_or_left(tmp_path: Path, kind: str) -> None:
    how: dict[str, Any] = {"dtype": "auto", "device": "cpu", "tp": TP}
    folder, how["kernels"] = make_tiny_mtp(tmp_path, kind), load_kernels("cpu")
    source = ModelSource(folder)
    assert source.has_own_head
    assert load_model(source, **how).draft_head is None
    change_config(folder, num_nextn_predict_layers=2)
    with pytest.raises(InvalidRequest, match="MTP heads of more than one layer are not served"):
        load_model(ModelSource(folder), draft_head=True, **how)
