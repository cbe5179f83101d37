"""A draft head that cannot be used costs the drafts, not the start; unless one is required."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.changes import change_config, change_tensors, cut_short
from support.checkpoints.copied_head import make_copied_pair
from support.ranks.small import check_only_drafts_are_lost, drafting
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.checkpoint.model_folder import fingerprint_of, read_entries
from surestep_worker.startup import speculation
from surestep_worker.startup.built import Built

start = drafting(method="eagle3", num_speculative_tokens=2)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    head = tmp_path / "head"
    return make_copied_pair(tmp_path / "model", head), head


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda head: (head / "config.json").unlink(), "cannot read"),
    "cut short": (cut_short, "model.safetensors"),
    "tensor": (
        lambda head: change_tensors(head, lambda w: w.pop("fc.weight")),
        "missing: fc.weight",
    ),
    "width": (lambda head: change_config(head, hidden_size=64), "hidden states of 64 elements"),
    "vocabulary": (lambda head: change_config(head, vocab_size=170), "a vocabulary of 170 tokens"),
    "d2t": (lambda head: change_tensors(head, lambda w: w["d2t"].add_(1)), "d2t does not name"),
    "nan": (
        lambda head: change_tensors(head, lambda w: w["fc.weight"].fill_(torch.nan)),
        "its logits are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_is_broken(pair: tuple[Path, Path], fault: str) -> None:
    breaks, message = FAULTS[fault]
    breaks(pair[1])
    if fault == "nan":  # read it where it counts
        change_tensors(pair[1], lambda w: w["lm_head.weight"].fill_(torch.nan))
    check_only_drafts_are_lost(partial(start, pair), message)


def test_a_head_that_works(pair: tuple[Path, Path]) -> None:
    built = start(pair, require_drafter=True)
    facts = built.facts
    assert (facts.drafter, facts.max_draft_tokens, facts.drafter_fault) == ("eagle3", 2, "")
    assert list(facts.draft_layers) == [1, 2]
    assert facts.check_accepted > 0.2 * facts.check_drafts > 0
    again = start(pair, built.profile_result).facts
    assert (list(again.draft_layers), again.check_drafts) == ([1, 2], facts.check_drafts)


@torch.inference_mode()
def logits(built: Built) -> torch.Tensor:
    """What the head makes of a few rows, as if they were its output."""
    head = built.runner.context.model.draft_head
    assert head is not None
    return head.logits(torch.randn(3, head.width, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("left", ["nothing", "another head", "a broken head"])
def test_a_rank_that_follows_reads_no_file_of_the_head(pair: tuple[Path, Path], left: str) -> None:
    """Its weights outlive the rank as those of the model do."""
    held = HeldWeights()
    first = start(pair, held=held)
    assert held.nbytes > os.fstat(held.fds.model).st_size > 0
    if left == "nothing":
        shutil.rmtree(pair[1])
    elif left == "another head":
        change_tensors(pair[1], lambda w: w["lm_head.weight"].neg_())
    else:
        cut_short(pair[1])
    second = start(pair, first.profile_result, held)
    assert (second.facts.drafter, second.facts.drafter_fault) == ("eagle3", "")
    assert torch.equal(logits(first), logits(second))
    held.renew(all_of_it=False)  # keeps what is complete
    assert torch.equal(logits(first), logits(start(pair, first.profile_result, held)))


def test_ranks_with_different_heads_in_memory_look_into_their_folders(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one supervisor was lost, and with it the head as it was before."""
    held = HeldWeights()
    first = start(pair, held=held)
    change_tensors(pair[1], lambda w: w["lm_head.weight"].neg_())
    for other, drafter in ((fingerprint_of(pair[1]), "eagle3"), ("0" * 32, "")):
        monkeypatch.setattr(
            speculation, "gather_fingerprints", lambda mine, tp, other=other: [mine, other]
        )
        second = start(pair, first.profile_result, held)
        assert second.facts.drafter == drafter
        if drafter:
            assert torch.equal(logits(second), -logits(first))
        else:
            assert "another rank has another one" in second.facts.drafter_fault


def test_a_head_that_is_broken_leaves_nothing_behind(pair: tuple[Path, Path]) -> None:
    """What was begun of it is not taken for a head by the next rank."""
    held = HeldWeights()
    change_tensors(pair[1], lambda w: w["d2t"].add_(1))
    first = start(pair, held=held)
    assert "d2t" in first.facts.drafter_fault
    assert held.nbytes == os.fstat(held.fds.model).st_size
    held.renew(all_of_it=False)
    change_tensors(pair[1], lambda w: w["d2t"].sub_(1))
    assert start(pair, b"", held).facts.drafter == "eagle3"


def test_layer_numbers_that_are_meant_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nested ones name the layer that is read; these count those before it."""
    head = tmp_path / "head"
    pair = make_copied_pair(tmp_path / "model", head, guard=True), head
    change_config(head, eagle_aux_hidden_state_layer_ids=None)
    change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})
    built = start(pair)
    assert list(built.facts.draft_layers) == [1, 2]
    assert "it reads the latter" in caplog.text
    assert built.facts.check_accepted > 0.05 * built.facts.check_drafts
    again = start(pair, built.profile_result)
    head_again = again.runner.context.model.draft_head
    assert head_again is not None
    assert head_again.captured_layers == (1, 2)


def test_a_pickle_is_refused_with_the_command_that_converts_it(pair: tuple[Path, Path]) -> None:
    _, head = pair
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    fault = start(pair).facts.drafter_fault
    command = fault.partition('python -c "')[2].removesuffix('"')
    subprocess.run([sys.executable, "-c", command], cwd=head, check=True, timeout=60)
    assert "fc.weight" in read_entries(head)
