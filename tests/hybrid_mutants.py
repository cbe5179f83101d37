"""Bugs that hybrids are known for, put back one at a time; see mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pytest
from surestep_worker import host_step as product
from surestep_worker.recurrent import RecurrentCache
from surestep_worker.state_rows import StateRows, state_rows

HYBRID_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _mutant(mutate: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    HYBRID_MUTANTS[mutate.__name__] = mutate
    return mutate


def _change_columns(
    patch: pytest.MonkeyPatch, change: Callable[[Any, StateRows], dict[str, Any]]
) -> None:
    """Replace columns of what the rows do to the state."""
    original = state_rows

    @wraps(original)
    def changed(rows: Any, *rest: Any) -> StateRows:
        made = original(rows, *rest)
        return made._replace(columns=made.columns._replace(**change(rows, made)))

    patch.setattr(product, "state_rows", changed)


@_mutant
def one_record_too_few(patch: pytest.MonkeyPatch) -> None:
    """The column of the accepted count, off by one (#41190)."""
    _change_columns(patch, lambda rows, made: {"pending": np.maximum(made.columns.pending - 1, 0)})


@_mutant
def whole_window_folded(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts reach the state, as if every window had been accepted (#45100)."""
    widths: dict[int, int] = {}

    def change(rows: Any, made: StateRows) -> dict[str, Any]:
        pending = made.columns.pending.copy()
        for row, slot in enumerate(made.columns.slots.tolist()):
            if pending[row]:
                pending[row] = widths.get(slot, pending[row])
            widths[slot] = int(made.columns.cu_rows[row + 1] - made.columns.cu_rows[row])
        return {"pending": pending}

    _change_columns(patch, change)


@_mutant
def short_windows_taken_for_prompts(patch: pytest.MonkeyPatch) -> None:
    """Rows of one token advance the state at once, whatever they are (#36917)."""

    def change(rows: Any, made: StateRows) -> dict[str, Any]:
        width = np.diff(made.columns.cu_rows)
        return {"window": np.where(width == 1, 0, made.columns.window).astype(np.int32)}

    _change_columns(patch, change)


@_mutant
def state_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """State is looked up by the place in the batch instead of the slot."""
    _change_columns(patch, lambda rows, made: {"slots": np.arange(len(rows))})


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
