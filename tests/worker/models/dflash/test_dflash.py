"""DFlash drafters draft what transformers' class of the formula drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.dflash import save_drafter, sizes_for
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.bench import Neighbours, build_runner, load
from support.parity.proposals import proposals
from support.references.dflash import KINDS, DFlashReference
from support.references.eagle3 import captured_states
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters.block import BlockSteps
from surestep_worker.layers.context import StepBatch
from surestep_worker.layers.decoder_layer import DecoderLayer
from transformers import AutoConfig, AutoModelForCausalLM

K, VOCAB, MASK = 5, 160, 159
WHERE = Neighbours(num_slots=4, step_tokens=24, max_model_len=160)
FULL, SLIDING = KINDS
IDS = torch.arange(1, VOCAB, 2)  # of a drafter with fewer tokens
OWN_ROWS = torch.randn(len(IDS), 64, generator=torch.Generator().manual_seed(9))
Change = Callable[[pytest.MonkeyPatch], None]

# How the drafter is made, and how it is saved.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"layer_types": [FULL, FULL], "target_layer_ids": (0, 2)}, {}),
    "windows": ({"layer_types": [SLIDING, FULL], "target_layer_ids": (1, 2, 3)}, {}),
    "every layer slides": (
        {"layer_types": [SLIDING, SLIDING], "target_layer_ids": (4,)},
        {
            "layer_types": [FULL, FULL],
            "dflash_config": {
                "use_swa": True,
                "swa_window_size": 6,
                "mask_token_id": MASK,
                "target_layer_ids": [4],
            },
            "sliding_window": 9,
        },
    ),
    "windows that look ahead": (
        {"layer_types": [SLIDING, FULL], "causal": (), "target_layer_ids": (1, 2, 3)},
        {},
    ),
    "speculators whose windows look ahead": (
        {"layer_types": [SLIDING, SLIDING], "causal": (), "target_layer_ids": (1, 3)},
        {"speculators": True, "is_causal": None, "sliding_window_non_causal": True},
    ),
    "causal": ({"layer_types": [FULL], "causal": KINDS, "target_layer_ids": (0, 1)}, {}),
    "speculators": (
        {"layer_types": [SLIDING, FULL], "target_layer_ids": (0, 1, 2)},
        {"speculators": True},
    ),
    "fewer tokens": (
        {"layer_types": [FULL], "target_layer_ids": (1, 3)},
        {"speculators": True, "draft_vocab_size": len(IDS)},
    ),
}


# Makes a model of 160 tokens and five layers or more.
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: make_tiny_checkpoint(folder, vocab=VOCAB, layers=5),
    "qwen3": lambda folder: make_tiny_checkpoint(folder, "qwen3", vocab=VOCAB, layers=6, tie=True),
    "qwen3_5": lambda folder: make_tiny_hybrid(folder, vocab=VOCAB, mtp=False),
    "gpt_oss": lambda folder: make_tiny_gpt_oss(folder, vocab=VOCAB, num_hidden_layers=5),
    "theirs": lambda folder: make_tiny_checkpoint(folder, "cohere", vocab=VOCAB, layers=5),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.rotates(1)
def test_drafts_are_those_of_the_formula(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share_of_wrong("llama", name, tmp_path, monkeypatch) <= 0.02  # near ties


@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama"])
@pytest.mark.rotates(1)
def test_whatever_the_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_wrong(model, "full", tmp_path, monkeypatch) <= 0.02


def causal_everywhere(patch: pytest.MonkeyPatch) -> None:
    """No row of a block sees those behind it."""
    right = BlockSteps._batch

    def batch(self: BlockSteps, *told: Any) -> StepBatch:
        made = right(self, *told)
        return replace(made, groups=(made.groups[1],) * 2)

    patch.setattr(BlockSteps, "_batch", batch)


def one_row_less(patch: pytest.MonkeyPatch) -> None:
    """No row sees the last one of its block."""
    right = BlockSteps._batch

    def batch(self: BlockSteps, *told: Any) -> StepBatch:
        made = right(self, *told)
        pages = made.groups[0]
        rows: AttentionRows = pages.rows._replace(start=pages.rows.start - 1)
        return replace(made, groups=(pages._replace(rows=rows), made.groups[1]))

    patch.setattr(BlockSteps, "_batch", batch)


def windows_from_the_end_of_the_block(patch: pytest.MonkeyPatch) -> None:
    right = BlockSteps._batch

    def batch(self: BlockSteps, *told: Any) -> StepBatch:
        made = right(self, *told)
        pages = made.groups[0]
        narrow = pages._replace(rows=pages.rows._replace(wider=None))
        return replace(made, groups=(narrow, made.groups[1]))

    patch.setattr(BlockSteps, "_batch", batch)


def context_a_position_late(patch: pytest.MonkeyPatch) -> None:
    right = DecoderLayer.store

    def store(self: DecoderLayer, x: torch.Tensor, batch: StepBatch, *rest: Any) -> None:
        right(self, x, replace(batch, positions=batch.positions + 1), *rest)

    patch.setattr(DecoderLayer, "store", store)


def no_context(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecoderLayer, "store", lambda *told: None)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (causal_everywhere, "full"),
        (one_row_less, "full"),
        (windows_from_the_end_of_the_block, "windows that look ahead"),
        (context_a_position_late, "full"),
        (no_context, "full"),
    ],
)
@pytest.mark.rotates(1)
def test_another_computation_is_seen(
    mutant: Change, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert share_of_wrong("llama", name, tmp_path, monkeypatch) > 0.05


def test_the_mask_is_never_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its row of the output head may have the greatest logit."""
    MODELS["llama"](tmp_path)
    save(tmp_path, "full")
    tp = TensorParallel()
    model, drafted = load(tmp_path, tp), list[int]()
    head: Any = model.draft_head
    right = head._logits
    monkeypatch.setattr(
        head, "_logits", lambda hidden: right(hidden).index_fill_(1, torch.tensor([MASK]), 1e4)
    )
    proposed, _ = proposals(build_runner(model, tp, WHERE, "dflash", K), monkeypatch)
    for _, drafts in proposed:
        drafted += drafts
    assert drafted
    assert MASK not in drafted


def save(folder: Path, name: str) -> DFlashReference:
    """Write a drafter for the model in a folder."""
    made, saved = DRAFTERS[name]
    reference = DFlashReference(sizes_for(folder), mask_id=MASK, **made)
    fewer = {"lm_head.weight": OWN_ROWS, "d2t": IDS - torch.arange(len(IDS))}
    more = fewer if "draft_vocab_size" in saved else {}
    layers = AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers
    save_drafter(folder / "dflash", reference, layers, more=more, **saved)
    return reference


def own_logits(hidden: torch.Tensor) -> torch.Tensor:
    """Return logits of the tokens that a drafter with fewer of them has."""
    logits = torch.full((len(hidden), VOCAB), -torch.inf)
    return logits.index_copy_(1, IDS, hidden @ OWN_ROWS.T)


@torch.no_grad()
def share_of_wrong(model: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of the windows that are drafted, those that the formula drafts otherwise."""
    MODELS[model](folder)
    reference = save(folder, name)
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tp = TensorParallel()
    proposed, _ = proposals(build_runner(load(folder, tp), tp, WHERE, "dflash", K), monkeypatch)
    assert len(proposed) > 40
    embedding, wrong = target.get_input_embeddings().weight, 0
    fewer = "draft_vocab_size" in DRAFTERS[name][1]
    output = own_logits if fewer else target.get_output_embeddings()
    layers = [i + 1 for i in reference.config.target_layer_ids]
    for known, drafts in proposed:
        states = captured_states(target, torch.tensor([known[:-1]]), layers)
        captured = [state[0] for state in states]
        told = known[-1], captured, len(drafts), embedding, output
        wrong += reference.draft(*told) != drafts
    return wrong / len(proposed)
