"""Models that transformers' code computes: refusals, and what the rehearsal finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.any_architecture import tiny_config
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.architectures import saved
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.models.transformers.attention import PAGED, PagedLayer
from surestep_worker.models.transformers.model import TransformersModel
from surestep_worker.models.transformers.modules import OwnRotation
from torch import Tensor, nn

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path, "cohere", intermediate=128)


def load(folder: Path, dtype: str = "auto") -> TransformersModel:
    model = load_model(
        ModelSource(folder),
        dtype=dtype,
        device="cpu",
        tp=TensorParallel(),
        kernels=load_kernels("cpu"),
    )
    assert isinstance(model, TransformersModel)
    return model


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["OwnForCausalLM"]}, "unknown architecture 'OwnForCausalLM'$"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.Config"}},
            "'OwnForCausalLM'; code of a checkpoint .--trust-remote-code. is never run",
        ),
        ({"model_type": "gpt2"}, "CohereForCausalLM is no model of type gpt2"),
        ({"hidden_size": "wide"}, "config.json: .*hidden_size"),
        ({"num_attention_heads": 0}, "transformers cannot build CohereForCausalLM"),
        ({"hidden_size": 72}, "of another shape"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 and must be"),
        ({"num_hidden_layers": 3}, "checkpoint tensors missing: model.layers.2"),
        ({"num_hidden_layers": 1}, "checkpoint tensors unexpected: model.layers.1"),
        ({"vocab_size": 100}, "of another shape"),
    ],
)
def test_a_config_that_is_wrong_is_refused_in_a_line(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    change(folder, **values)
    with pytest.raises(InvalidRequest, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("MambaForCausalLM", {}, "keeps a state: not served"),
        ("BertLMHeadModel", {"is_decoder": False}, "attends in both directions: not served"),
        ("FalconForCausalLM", {"alibi": True}, "Falcon with ALiBi is not served"),
        ("RemBertForCausalLM", {}, "RemBertForCausalLM attends by code of its own"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "1 of 2 layers that do"),
        ("DoryForCausalLM", {}, "Dory[A-Za-z]+, an output head, is not served"),
        ("JetMoeForCausalLM", {}, "JetMoeTopKGating makes tensors whose shapes depend on values"),
        ("AXK2ForCausalLM", {}, "AXK2Attention reads the mask of attention itself: not served"),
    ],
)
def test_an_architecture_that_needs_what_we_lack_is_refused_by_name(
    tmp_path: Path, architecture: str, fields: dict[str, Any], message: str
) -> None:
    config = tiny_config(architecture, **fields)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    rewrite(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(InvalidRequest, match=message):
        ModelSource(tmp_path)


def test_tensors_that_nothing_wants_are_refused(folder: Path) -> None:
    rewrite(folder, load_file(folder / WEIGHTS) | {"model.extra.weight": torch.zeros(2, 2)})
    with pytest.raises(InvalidRequest, match=r"unexpected: model\.extra\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "ranks", "expert_parallel", "message"),
    [
        ("CohereForCausalLM", 3, False, "3 does not divide 4 heads and 2 KV heads of Cohere"),
        ("GPT2LMHeadModel", 8, False, "8 does not divide 4 heads of GPT2LMHeadModel"),
        ("GraniteMoeForCausalLM", 5, False, " and 96 columns of experts of GraniteMoeForCausalLM"),
        ("GraniteMoeForCausalLM", 8, True, "does not divide 4 heads and 4 experts of Granite"),
    ],
)
def test_ranks_that_do_not_divide_what_they_share_are_refused(
    tmp_path: Path, architecture: str, ranks: int, expert_parallel: bool, message: str
) -> None:
    saved(architecture, tmp_path)
    config = ModelSource(tmp_path).config
    config.check_ranks(2, expert_parallel=expert_parallel)
    with pytest.raises(InvalidRequest, match=message):
        config.check_ranks(ranks, expert_parallel=expert_parallel)


class Crowd(nn.Module):
    """Adds to each row a little of all of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._inner(x)
        return made + 1e-6 * made.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("architecture", ["Dots1ForCausalLM", "GraniteSWAForCausalLM"])
def test_weights_that_stay_in_float32_are_served_in_bfloat16(
    tmp_path: Path, architecture: str
) -> None:
    """A router, and sinks."""
    saved(architecture, tmp_path)
    load(tmp_path, "bfloat16").rehearse()


def test_a_module_whose_rows_depend_on_each_other_is_named(folder: Path) -> None:
    model = load(folder)
    model.rehearse()
    layer = model._decoder.layers[1]
    layer.mlp = Crowd(layer.mlp)
    with pytest.raises(InvalidRequest, match=r"rows computed by layers\.1\.mlp depend on"):
        model.rehearse()


def test_attention_that_differs_from_theirs_is_found(folder: Path) -> None:
    model = load(folder)
    attention = model._decoder.layers[0].self_attn
    layers: tuple[PagedLayer, ...] = getattr(attention, PAGED)
    setattr(attention, PAGED, tuple(layer._replace(window=2) for layer in layers))
    with pytest.raises(InvalidRequest, match="attends in a way that is not served"):
        model.rehearse()


@pytest.mark.parametrize(
    ("architecture", "ours"),
    [
        ("Dots1ForCausalLM", True),
        ("GPTNeoXForCausalLM", True),  # a part of each head
        ("CohereForCausalLM", False),  # pairs, not halves
    ],
)
def test_rotations_that_are_ours_are_compared_with_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, ours: bool
) -> None:
    saved(architecture, tmp_path)
    model = load(tmp_path)
    model.rehearse()
    monkeypatch.setattr(
        OwnRotation, "rotate", lambda rotation, q, k, turns: (k.new_zeros(q.shape), k)
    )
    if not ours:
        model.rehearse()
        return
    with pytest.raises(InvalidRequest, match="attends in a way that is not served"):
        model.rehearse()
