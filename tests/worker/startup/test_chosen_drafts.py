"""Drafts that nobody asked for: chosen by what the model has, and given up where that is no use."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from repo.source import ROOT
from safetensors.torch import load_file, save_file
from support.checkpoints.copied_head import make_copied_pair
from support.checkpoints.dflash import make_counting_pair
from support.checkpoints.embedders import make_tiny_embedder
from support.checkpoints.hybrid import make_tiny_hybrid
from support.ranks.small import start_small
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.startup import speculation
from surestep_worker.startup.built import Built

TRAINED = ROOT / "tests/data/tiny-hybrid"


def start(
    model: Path, profile_result: bytes = b"", held: HeldWeights | None = None, **settings: Any
) -> Built:
    drafters = model.parent / "drafters"
    return start_small(model, profile_result, held, drafters=drafters, **settings)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and among drafters a head whose card names it."""
    head = tmp_path / "drafters/head"
    model = make_copied_pair(tmp_path / "model", head)
    (head / "README.md").write_text("---\nbase_model: somebody/model\n---\n")
    return model, head


def drafts(built: Built) -> tuple[str, int]:
    return built.facts.drafter, built.facts.max_draft_tokens


def change(folder: Path, name: str, to: torch.Tensor | None) -> None:
    """Replace a tensor of a checkpoint, or take it out."""
    weights = load_file(folder / "model.safetensors")
    assert weights.pop(name) is not None
    weights |= {} if to is None else {name: to}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_head_in_the_checkpoint_comes_first() -> None:
    built = start(TRAINED)
    assert drafts(built) == ("mtp", 3)
    assert built.facts.drafts_because == "the checkpoint has an MTP head"
    assert len(built.facts.costs.step_us) > 0


def test_then_a_head_that_names_the_model(pair: tuple[Path, Path]) -> None:
    model, head = pair
    built = start(model)
    assert drafts(built) == ("eagle3", 4)
    assert built.facts.drafts_because == "the head head is for this model"
    chosen = json.loads(built.facts.speculative_config)
    assert (chosen["model"], chosen["prompt_lookup_min"]) == (str(head), 2)


def test_or_a_drafter_of_whole_windows(tmp_path: Path) -> None:
    drafter = tmp_path / "drafters/head"
    model = make_counting_pair(tmp_path / "model", drafter)
    (drafter / "README.md").write_text("---\nbase_model: somebody/model\n---\n")
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"block_size": 6}))
    assert drafts(start(model)) == ("dflash", 5)


def test_then_lookups(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (pair[1] / "README.md").unlink()
    plain = make_tiny_hybrid(tmp_path / "hybrid", mtp=False)
    for model in (pair[0], plain):
        built = start(model)
        assert drafts(built) == ("ngram", 4)
        assert built.facts.drafts_because == "no draft head for this model is here"
        assert built.facts.drafter_looks_up
        assert len(built.facts.costs.step_us) > 0


def test_none_turns_it_off_and_vectors_have_no_drafts(pair: tuple[Path, Path]) -> None:
    embedder = make_tiny_embedder(pair[0].parent / "embedder", architecture="Qwen3Model")
    for built in (start(pair[0], speculative_config="none"), start(embedder)):
        assert drafts(built) == ("", 0)
        assert not built.facts.drafts_because
        assert not built.facts.drafter_fault


def test_an_incomplete_head_in_the_checkpoint_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_hybrid(tmp_path / "model")
    change(model, "mtp.fc.weight", None)
    built = start(model)
    assert drafts(built) == ("ngram", 4)
    assert "missing: mtp.fc.weight; loading the model without its MTP head" in caplog.text
    with pytest.raises(InvalidRequest, match=r"mtp\.fc\.weight"):
        start(model, speculative_config={"method": "mtp", "num_speculative_tokens": 3})


NONSENSE = torch.randn(152, 32, generator=torch.Generator().manual_seed(0))
FAULTS = {
    "another width": ("fc.weight", None, "missing: fc.weight"),
    "nothing finite": ("norm.weight", torch.full((32,), torch.nan), "0 of 0 drafts accepted"),
    "nonsense": ("lm_head.weight", NONSENSE, "drafts accepted: what repeats"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_no_use_makes_room_for_lookups(
    pair: tuple[Path, Path], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, tensor, message = FAULTS[fault]
    change(pair[1], name, tensor)
    built = start(pair[0])
    assert drafts(built) == ("ngram", 4)
    assert not built.facts.drafter_fault
    assert message in caplog.text
    assert len(built.facts.costs.step_us) > 0
    with pytest.raises(InvalidRequest):
        start(pair[0], require_drafter=True)


def test_a_head_of_another_shape_is_not_loaded(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((pair[1] / "config.json").read_text())
    (pair[1] / "config.json").write_text(json.dumps(config | {"vocab_size": 170}))
    assert drafts(start(pair[0])) == ("ngram", 4)
    assert "a vocabulary of 170 tokens" in caplog.text


def test_a_rank_that_follows_does_not_choose_again(pair: tuple[Path, Path]) -> None:
    first = start(pair[0])
    (pair[1] / "README.md").unlink()
    second = start(pair[0], first.profile_result)
    assert drafts(second) == ("eagle3", 4)
    assert second.facts.drafts_because == first.facts.drafts_because
    assert drafts(start(pair[0])) == ("ngram", 4)


def test_a_rank_follows_one_whose_own_head_was_no_use(tmp_path: Path) -> None:
    """With the weights that it left in memory, the head's among them."""
    model, held = make_tiny_hybrid(tmp_path / "model"), HeldWeights()
    first = start(model, held=held)
    assert drafts(first) == ("ngram", 4)
    (model / "model.safetensors").unlink()
    second = start(model, first.profile_result, held)
    assert drafts(second) == ("ngram", 4)
    assert second.facts.drafts_because == first.facts.drafts_because


def test_ranks_that_found_different_heads_look_up(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "gather_fingerprints", lambda mine, tp: [mine, "0" * 32])
    built = start(pair[0])
    assert drafts(built) == ("ngram", 4)
    assert built.facts.drafts_because == "the ranks have different draft heads"


def test_the_start_says_what_was_chosen(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        start(pair[0])
    wanted = "eagle3 drafts: the head head is for this model; --speculative-config none turns it"
    assert wanted in caplog.text
