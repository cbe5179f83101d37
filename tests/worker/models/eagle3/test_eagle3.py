"""EAGLE-3 heads draft what their definition says, in every form that they are published in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import HEAD, LOOKUP, Neighbours, build_runner, load
from support.parity.proposals import proposals
from support.references.eagle3 import captured_states
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.linear import INT8, Rounding
from surestep_kernels.ngram import ngram_reference
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.attention import Attention
from surestep_worker.models import draft_loader
from transformers import AutoModelForCausalLM

K, VOCAB = 4, 160
WHERE = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)
RANDOM = torch.Generator().manual_seed(4)
IDS = torch.randperm(VOCAB, generator=RANDOM)[:96].sort().values

TWO_LAYERS = {"num_hidden_layers": 2}

# How the head is made, and how it is saved.
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SafeAILab, fewer tokens": ({"draft_vocab": 96}, {"token_ids": IDS}),
    "ModelOpt, the model's output head": ({}, {"form": "modelopt"}),
    "SpecForge": ({"draft_vocab": 96}, {"form": "specforge", "token_ids": IDS}),
    "speculators, normed": (
        {"norm_before_fc": True, "norm_before_residual": True, "draft_vocab": 96},
        {"form": "speculators", "token_ids": IDS},
    ),
    "speculators, Qwen3 layers": (
        {"kind": "qwen3", "fc_norm": True, "norm_output": True},
        {"form": "speculators", "layer_ids": (0, 2, 3)},
    ),
    "the model's rows": ({"draft_vocab": 96}, {"token_ids": IDS, "own_rows": False}),
    "a window of five rows": ({"window": 5}, {"form": "safeailab"}),
    "an embedding of its own": (
        {"norm_before_fc": True},
        {"form": "specforge", "embedding": torch.randn(VOCAB, 64, generator=RANDOM)},
    ),
    "P-EAGLE": (
        {"mask_id": 159, "draft_vocab": 96, "norm_before_fc": True, "layer": TWO_LAYERS},
        {"form": "specforge", "token_ids": IDS, "parallel_drafting": True, "ptd_token_id": 159},
    ),
    "P-EAGLE of speculators": (
        {"mask_id": 7, "fc_norm": True, "norm_output": True, "window": 5},
        {"form": "speculators", "speculators_model_type": "peagle", "mask_token_id": 7},
    ),
    "two layers, four states": (
        {"num_captured": 4, "layer": TWO_LAYERS},
        {"form": "modelopt", "layer_ids": (1, 2, 3, 5)},
    ),
}


# Makes a model of 160 tokens.
MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: make_tiny_checkpoint(folder, vocab=VOCAB, layers=5),
    "Qwen3": lambda folder: make_tiny_checkpoint(folder, "qwen3", vocab=VOCAB, layers=5),
    "tied": lambda folder: make_tiny_checkpoint(folder, vocab=VOCAB, layers=5, tie=True),
    "hybrid": lambda folder: make_tiny_hybrid(folder, vocab=VOCAB, mtp=False),
    "hybrid of experts": lambda folder: make_tiny_hybrid(
        folder, "qwen3_5_moe", vocab=VOCAB, mtp=False
    ),
    "gpt-oss": lambda folder: make_tiny_gpt_oss(folder, vocab=VOCAB),
}


@pytest.mark.parametrize("name", [name for name in HEADS if name != "the model's rows"])
@pytest.mark.rotates(2)
def test_drafts_are_those_of_the_definition(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare("dense", name, tmp_path, monkeypatch)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "dense"])
@pytest.mark.rotates(1)
def test_whatever_the_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(model, "SafeAILab, fewer tokens", tmp_path, monkeypatch)


def test_a_smaller_output_head_may_be_rows_of_the_tied_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare("tied", "the model's rows", tmp_path, monkeypatch)


def test_rows_of_an_output_head_that_is_no_embedding_are_missed(tmp_path: Path) -> None:
    MODELS["dense"](tmp_path)
    reference = make_reference(tmp_path, draft_vocab=96)
    save_head(tmp_path / HEAD, reference, token_ids=IDS, own_rows=False, layer_ids=(1, 2, 4))
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight"):
        load(tmp_path, TensorParallel())


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.rotates(1)
def test_a_window_of_another_width_is_seen(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: what is compared here is able to differ."""

    def attention(*told: Any, window: int) -> Attention:
        return Attention(*told, window=window + more)

    monkeypatch.setattr("surestep_worker.layers.draft_head.Attention", attention)
    assert share_of_wrong("dense", "a window of five rows", tmp_path, monkeypatch) > 0.1


def test_what_repeats_itself_is_looked_up_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS["dense"](tmp_path)
    save_head(tmp_path / HEAD, make_reference(tmp_path), layer_ids=(1, 2, 4))
    tp = TensorParallel()
    drafts = list[dict[tuple[int, ...], list[int]]]()
    for drafter in ("eagle3", f"eagle3{LOOKUP}"):
        with monkeypatch.context() as patch:
            built = build_runner(load(tmp_path, tp), tp, WHERE, drafter, K)
            proposed, _ = proposals(built, patch)
        drafts.append({tuple(known): made for known, made in proposed})
    heads, both = drafts
    looked_up = 0
    for known, made in both.items():
        row, length = torch.tensor([known]), torch.tensor([len(known)])
        most = torch.tensor([len(made)])
        found = ngram_reference(
            *(row, torch.tensor([0]), length, most), num_drafts=K, max_n=5, min_n=2
        )
        if found.counts[0]:
            looked_up += 1
            assert made == found.ids[0, : len(made)].tolist()
        elif known in heads:  # which may have been asked at other lengths
            assert made == heads[known][: len(made)]
    assert 0 < looked_up < len(both) - 5
    assert len(both.keys() & heads.keys()) > 10


@pytest.mark.parametrize("bits", [8, 4])
def test_a_head_of_fewer_bits_drafts_much_the_same(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads of 16-bit models have 8; the fewer, the more drafts are others."""
    monkeypatch.setattr(draft_loader, "_rounding", lambda kernels, dtype: Rounding(bits))
    wrong = share_of_wrong("tied", "the model's rows", tmp_path, monkeypatch)
    assert wrong <= 0.1 if bits == 8 else 0.1 < wrong < 1.0


def test_heads_are_rounded_where_that_costs_nothing() -> None:
    kernels = load_kernels("cpu")
    assert draft_loader._rounding(kernels, torch.bfloat16) == INT8
    assert draft_loader._rounding(kernels, torch.float32) is None
    without = replace(kernels, affine=False)  # as on GPUs
    assert draft_loader._rounding(without, torch.bfloat16) is None


def compare(model: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Near ties between float32 computed in two ways.
    assert share_of_wrong(model, name, folder, monkeypatch) <= 0.02


@torch.no_grad()
def share_of_wrong(model: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the windows that are drafted, those that the definition drafts otherwise."""
    made, saved = HEADS[name]
    MODELS[model](folder)
    reference = make_reference(folder, **made)
    layers = saved.get("layer_ids", (1, 2, 4))
    target: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    if saved.get("form") == "modelopt":  # which is saved without it
        reference.lm_head.weight.data[:] = target.lm_head.weight
    if not saved.get("own_rows", True):
        reference.lm_head.weight.data[:] = target.lm_head.weight[IDS]
    save_head(folder / HEAD, reference, **{"layer_ids": layers, **saved})
    tp = TensorParallel()
    proposed, _ = proposals(build_runner(load(folder, tp), tp, WHERE, "eagle3", K), monkeypatch)
    assert len(proposed) > 40
    embedding = saved.get("embedding", target.get_input_embeddings().weight)
    wrong = 0
    for known, drafts in proposed:
        captured = captured_states(target, torch.tensor([known[:-1]]), layers)
        states, ids = [state[0] for state in captured], saved.get("token_ids")
        told = torch.tensor(known), states, len(drafts), embedding, ids
        wrong += reference.draft(*told) != drafts
    return wrong / len(proposed)
