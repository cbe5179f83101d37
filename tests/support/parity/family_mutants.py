"""Bugs that hybrids and gpt-oss are known for, put back one at a time; see mutants.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from surestep_common.invariants import IntArray
from surestep_common.kv_groups import KVGroups
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.layers.attention import Attention
from surestep_worker.layers.context import StepBatch
from surestep_worker.step import forward
from torch import Tensor

Mutate = Callable[[pytest.MonkeyPatch], None]
HYBRID_MUTANTS: dict[str, Mutate] = {}
GPT_OSS_MUTANTS: dict[str, Mutate] = {}


def _into(mutants: dict[str, Mutate]) -> Callable[[Mutate], Mutate]:
    def register(mutate: Mutate) -> Mutate:
        mutants[mutate.__name__] = mutate
        return mutate

    return register


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


@_into(HYBRID_MUTANTS)
def one_record_too_few(patch: pytest.MonkeyPatch) -> None:
    """The column of the accepted count, off by one (#41190)."""
    _change_columns(patch, lambda rows: {"pending": (rows.pending - 1).clamp(min=0)})


@_into(HYBRID_MUTANTS)
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


@_into(HYBRID_MUTANTS)
def short_windows_taken_for_prompts(patch: pytest.MonkeyPatch) -> None:
    """Rows of one token advance the state at once, whatever they are (#36917)."""
    _change_columns(patch, lambda rows: {"window": rows.window * (rows.cu_rows.diff() != 1)})


@_into(HYBRID_MUTANTS)
def state_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """State is looked up by the place in the batch instead of the slot."""
    _change_columns(patch, lambda rows: {"slots": torch.arange(len(rows.slots))})


@_into(HYBRID_MUTANTS)
def snapshot_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """A cached prefix gets the state of another length or another text (#53912)."""
    restore = RecurrentCache.restore

    def wrong(self: RecurrentCache, snapshot_id: int, slot: int, length: int) -> None:
        restore(self, snapshot_id - 1 or self.num_snapshots, slot, length)

    patch.setattr(RecurrentCache, "restore", wrong)


@_into(HYBRID_MUTANTS)
def cached_prefix_without_state(patch: pytest.MonkeyPatch) -> None:
    """A cached prefix brings its KV and leaves the state as it was (#47194)."""
    patch.setattr(RecurrentCache, "restore", lambda self, snapshot_id, slot, length: None)


def _change(
    patch: pytest.MonkeyPatch,
    *,
    window: Callable[[int], int] = lambda window: window,
    sinks: Callable[[Tensor], Tensor] = lambda sinks: sinks,
) -> None:
    """Have every layer attend with another window, if it has one, or other sinks."""
    original = Attention.__call__

    @wraps(original)
    def changed(self: Attention, *args: Any) -> Any:
        kept = self._window, self._sinks
        assert self._sinks is not None
        self._window, self._sinks = self._window and window(self._window), sinks(self._sinks)
        try:
            return original(self, *args)
        finally:
            self._window, self._sinks = kept

    patch.setattr(Attention, "__call__", changed)


@_into(GPT_OSS_MUTANTS)
def window_of_one_more(patch: pytest.MonkeyPatch) -> None:
    """A token sees one position more than its window, as if itself did not count."""
    _change(patch, window=lambda window: window + 1)


@_into(GPT_OSS_MUTANTS)
def window_of_one_less(patch: pytest.MonkeyPatch) -> None:
    """And one position less."""
    _change(patch, window=lambda window: window - 1)


@_into(GPT_OSS_MUTANTS)
def sinks_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """As when two splits of the positions count them, each for itself."""
    _change(patch, sinks=lambda sinks: sinks + math.log(2))


@_into(GPT_OSS_MUTANTS)
def sinks_of_other_heads(patch: pytest.MonkeyPatch) -> None:
    """As when ranks share out the heads, but not the sinks."""
    _change(patch, sinks=lambda sinks: sinks.roll(1))


@_into(GPT_OSS_MUTANTS)
def scaled_sinks(patch: pytest.MonkeyPatch) -> None:
    """Sinks are logits as they are: only products of queries and keys are scaled."""
    _change(patch, sinks=lambda sinks: sinks / 4)


@_into(GPT_OSS_MUTANTS)
def pages_of_the_other_group(patch: pytest.MonkeyPatch) -> None:
    """Layers with a window use the block table of those without, and the other way round."""
    original = KVCache.layer

    def swapped(self: KVCache, number: int, groups: Sequence[Any]) -> Any:
        return original(self, number, groups[::-1])

    patch.setattr(KVCache, "layer", swapped)


@_into(GPT_OSS_MUTANTS)
def blocks_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """Scheduler and workers agree to give each block back while all of it is still seen."""
    first_block, first_blocks = KVGroups.first_block, KVGroups.first_blocks

    def early(self: KVGroups, window: int, length: int) -> int:
        return first_block(self, window, length + self.block_size)

    def all_early(self: KVGroups, window: int, lengths: IntArray) -> IntArray:
        return first_blocks(self, window, lengths + self.block_size)

    patch.setattr(KVGroups, "first_block", early)
    patch.setattr(KVGroups, "first_blocks", all_early)
