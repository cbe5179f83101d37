"""Drafts of a rank whose weights are others than those that were tried out: checked again, and told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import torch
from repo.source import ROOT
from safetensors.torch import load_file, save
from support.ranks.small import start_small
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.held_weights import HeldWeights
from surestep_worker.host import shared_memory as memory
from surestep_worker.startup.built import Built
from torch import Tensor

TRAINED = ROOT / "tests/data/tiny-hybrid"
HEAD = "mtp."


def update(held: HeldWeights, change: Callable[[str, Tensor], Tensor]) -> None:
    """Have the next rank load other tensors, all of them."""
    tensors = {k: v for path in TRAINED.glob("*.safetensors") for k, v in load_file(path).items()}
    fd = memory.create("update")
    os.write(fd, save({name: change(name, tensor) for name, tensor in tensors.items()}))
    held.replace(held.source._replace(version="next"), fd)


def accepted(built: Built) -> float:
    return built.facts.check_accepted / built.facts.check_drafts


def test_a_head_in_the_checkpoint_changes_with_it(caplog: pytest.LogCaptureFixture) -> None:
    held = HeldWeights(TRAINED)
    first = start_small(TRAINED, held=held)
    assert (first.facts.drafter, accepted(first) > 0.2) == ("mtp", True)
    for change, low in ((_worn, True), (_same, False)):
        update(held, change)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            built = start_small(TRAINED, first.profile_result, held)
        assert held.sealed
        assert built.facts.drafter == "mtp"
        assert (accepted(built) < 0.5 * accepted(first)) == low
        assert [r.levelno for r in caplog.records if "drafter check: " in r.message] == [
            logging.WARNING if low else logging.INFO
        ]
        again = start_small(TRAINED, first.profile_result, held)  # which maps what that one loaded
        assert again.checkpoint == built.checkpoint
        assert (built.checkpoint == first.checkpoint) == (change is _same)


def _same(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _worn(name: str, tensor: Tensor) -> Tensor:
    """Leave the head as useless as one that a trainer forgot."""
    return torch.zeros_like(tensor) if name.startswith(HEAD) else tensor


def test_weights_that_are_not_finite_are_refused_as_at_the_start() -> None:
    held = HeldWeights(TRAINED)
    first = start_small(TRAINED, held=held)
    update(held, lambda name, tensor: tensor * float("nan"))
    with pytest.raises(InvalidRequest, match="are not finite"):
        start_small(TRAINED, first.profile_result, held)
