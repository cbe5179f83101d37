"""The trainers run from end to end in miniature, and what they write is a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_worker.models import ModelSource
from tiny_hybrid.checkpoint import new_head, new_trunk, save
from tiny_hybrid.corpus import Batches, make_tokenizer, text
from train_eagle3 import main
from train_tiny_hybrid import train_head, train_trunk

VOCAB = 2048


def test_a_draft_head_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_checkpoint(tmp_path / "model", layers=5, tie=True, tokenizer=True)
    words = [str(tmp_path / "model"), str(tmp_path / "head"), "--work", str(tmp_path / "work")]
    words += ["--slots", "8", "--answer-tokens", "30", "--epochs", "0.5", "--draft-vocab", "300"]
    main([*words, "--tokens", "3000"])
    assert "losses" in capsys.readouterr().out
    head = load_file(tmp_path / "head" / "model.safetensors")
    assert len(head["d2t"]) == 300
    assert all(torch.isfinite(weight.float()).all() for weight in head.values())


def test_the_tiny_hybrid_and_its_head_are_trained(tmp_path: Path) -> None:
    """Each in its turn: the head leaves the trunk as it is."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(text()[0], VOCAB)
    batches = Batches(tokenizer, text()[0], 8, 192, seed=0)
    trunk = new_trunk(VOCAB)
    train_trunk(trunk, batches, steps=1, rate=1e-3)
    frozen = {name: weight.clone() for name, weight in trunk.state_dict().items()}
    head = new_head(trunk)
    start = {name: weight.detach().clone() for name, weight in head.items()}
    train_head(trunk, head, batches, steps=1, rate=1e-3)
    assert all(torch.equal(trunk.state_dict()[name], weight) for name, weight in frozen.items())
    assert not any(torch.equal(head[name], weight) for name, weight in start.items())
    save(tmp_path, trunk, head, tokenizer)
    assert ModelSource(tmp_path).config.layer_types
