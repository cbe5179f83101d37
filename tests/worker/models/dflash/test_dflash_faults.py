"""A DFlash drafter that cannot be used costs the drafts, not the start; unless one is required."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints.changes import change_config, change_tensors
from support.checkpoints.dflash import make_counting_pair
from support.ranks.small import check_only_drafts_are_lost, drafting
from surestep_worker.checkpoint.held_weights import HeldWeights

start = drafting(num_speculative_tokens=4)  # config.json tells the method


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    drafter = tmp_path / "drafter"
    return make_counting_pair(tmp_path / "model", drafter), drafter


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda drafter: (drafter / "model.safetensors").unlink(), "model.safetensors"),
    "tensor": (
        lambda drafter: change_tensors(drafter, lambda w: w.pop("fc.weight")),
        "missing: fc",
    ),
    "more": (
        lambda drafter: change_tensors(drafter, lambda w: w.update(mask_embedding=torch.zeros(64))),
        "mask_embedding",
    ),
    "kin": (
        lambda drafter: change_config(drafter, architectures=["DFlash2DraftModel"]),
        "DFlash2DraftModel is not served",
    ),
    "mask embedding": (
        lambda drafter: torch.save(torch.zeros(64), drafter / "mask_embedding.pt"),
        "mask_embedding.pt is not served",
    ),
    "other layers": (lambda drafter: change_config(drafter, num_target_layers=3), "another model"),
    "nan": (
        lambda drafter: change_tensors(drafter, lambda w: w["norm.weight"].fill_(torch.nan)),
        "its logits are not finite",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_is_broken(pair: tuple[Path, Path], fault: str) -> None:
    breaks, message = FAULTS[fault]
    breaks(pair[1])
    check_only_drafts_are_lost(partial(start, pair), message)


def test_more_drafts_than_a_block_holds(pair: tuple[Path, Path]) -> None:
    drafts = {"method": "dflash", "model": str(pair[1]), "num_speculative_tokens": 16}
    fault = start(pair, speculative_config=drafts).facts.drafter_fault
    assert "num_speculative_tokens 16: its blocks of 16 hold 15 drafts" in fault


def test_a_drafter_that_works(pair: tuple[Path, Path]) -> None:
    """And a rank that follows reads no file of it."""
    held = HeldWeights()
    first = start(pair, held=held, require_drafter=True)
    facts = first.facts
    assert (facts.drafter, facts.max_draft_tokens, facts.drafter_fault) == ("dflash", 4, "")
    assert list(facts.draft_layers) == [1]
    assert facts.check_accepted > 0.1 * facts.check_drafts > 0
    assert held.nbytes > os.fstat(held.fds.model).st_size > 0
    shutil.rmtree(pair[1])
    second = start(pair, first.profile_result, held).facts
    assert (second.drafter, second.drafter_fault) == ("dflash", "")
