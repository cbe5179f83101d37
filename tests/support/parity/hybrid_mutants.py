"""Bugs that hybrids are known for, put back one at a time; see mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.layers.context import StepBatch
from surestep_worker.step import forward

HYBRID_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _mutant(mutate: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    HYBRID_MUTANTS[mutate.__name__] = mutate
    return mutate


def _change_columns(
    patch: pytest.MonkeyPatch, change: Callable[[RecurrentRows], dict[str, Any]]
) -> None:
    """Replace columns of what the rows do to the state."""
    original = forward._batch

    @wraps(original)
    def changed(*args: Any) -> StepBatch:
        batch = original(*args)
        assert batch.recurrent is not None
        return replace(batch, recurrent=batch.recurrent._replace(**change(batch.recurrent)))

    patch.setattr(forward, "_batch", changed)


@_mutant
def one_record_too_few(patch: pytest.MonkeyPatch) -> None:
    """The column of the accepted count, off by one (#41190)."""
    _change_columns(patch, lambda rows: {"pending": (rows.pending - 1).clamp(min=0)})


@_mutant
def whole_window_folded(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts reach the state, as if every window had been accepted (#45100)."""
    widths: dict[int, int] = {}

    def change(rows: RecurrentRows) -> dict[str, Any]:
        pending, width = rows.pending.clone(), rows.cu_rows.diff().tolist()
        for row, slot in enumerate(rows.slots.tolist()):
            if pending[row]:
                pending[row] = widths.get(slot, int(pending[row]))
            widths[slot] = width[row]
        return {"pending": pending}

    _change_columns(patch, change)


@_mutant
def short_windows_taken_for_prompts(patch: pytest.MonkeyPatch) -> None:
    """Rows of one token advance the state at once, whatever they are (#36917)."""
    _change_columns(patch, lambda rows: {"window": rows.window * (rows.cu_rows.diff() != 1)})


@_mutant
def state_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """State is looked up by the place in the batch instead of the slot."""
    _change_columns(patch, lambda rows: {"slots": torch.arange(len(rows.slots))})


@_mutant
def snapshot_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """A cached prefix gets the state of another length or another text (#53912)."""
    restore = RecurrentCache.restore

    def wrong(self: RecurrentCache, snapshot_id: int, slot: int, length: int) -> None:
        restore(self, snapshot_id - 1 or self.num_snapshots, slot, length)

    patch.setattr(RecurrentCache, "restore", wrong)


@_mutant
def cached_prefix_without_state(patch: pytest.MonkeyPatch) -> None:
    """A cached prefix brings its KV and leaves the state as it was (#47194)."""
    patch.setattr(RecurrentCache, "restore", lambda self, snapshot_id, slot, length: None)
