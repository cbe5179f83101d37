"""A small rank in the test's own process, after which another may come."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from surestep_common.errors import InvalidRequest
from surestep_worker.checkpoint.held_weights import HeldWeights, WeightFds
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.build import build_runner
from surestep_worker.startup.built import Built


def start_small(
    model: Path, profile_result: bytes = b"", held: HeldWeights | None = None, **settings: Any
) -> Built:
    """Start it with what an earlier rank found out, and with the weights that one has held."""
    whole = WorkerSettings(
        model=model,
        device="cpu",
        max_num_seqs=4,
        max_model_len=128,
        kv_cache_memory=0.01,
        snapshot_memory=0.01,
        **settings,
    )
    fds = WeightFds(*map(os.dup, held.fds)) if held is not None else None
    return build_runner(whole, weights=fds, profile_result=profile_result)


def drafting(**drafts: object) -> Callable[..., Built]:
    """What starts the model of a pair, with the other one as what drafts for it."""

    def start(
        pair: tuple[Path, Path],
        profile_result: bytes = b"",
        held: HeldWeights | None = None,
        **settings: Any,
    ) -> Built:
        model, drafter = pair
        config = {"speculative_config": {"model": str(drafter), **drafts}}
        return start_small(model, profile_result, held, **config | settings)

    return start


def check_only_drafts_are_lost(start: Callable[..., Built], message: str) -> None:
    """A drafter that cannot be used costs the drafts, here and where another rank goes on; the
    start if it is required."""
    built = start()
    for facts in (built.facts, start(built.profile_result).facts):
        assert message in facts.drafter_fault
        assert "\n" not in facts.drafter_fault
        assert (facts.drafter, facts.max_draft_tokens, facts.drafter_has_state) == ("", 0, False)
    with pytest.raises(InvalidRequest) as refused:
        start(require_drafter=True)
    assert message in refused.value.message
