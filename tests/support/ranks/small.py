"""A small rank in the test's own process, after which another may come."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
