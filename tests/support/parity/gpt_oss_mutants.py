"""Bugs of attention with windows and sinks, put back one at a time; see mutants.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
from surestep_common.invariants import IntArray
from surestep_common.kv_groups import KVGroups
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.layers.attention import Attention
from torch import Tensor

GPT_OSS_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _mutant(mutate: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    GPT_OSS_MUTANTS[mutate.__name__] = mutate
    return mutate


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


@_mutant
def window_of_one_more(patch: pytest.MonkeyPatch) -> None:
    """A token sees one position more than its window, as if itself did not count."""
    _change(patch, window=lambda window: window + 1)


@_mutant
def window_of_one_less(patch: pytest.MonkeyPatch) -> None:
    """And one position less."""
    _change(patch, window=lambda window: window - 1)


@_mutant
def sinks_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """As when two splits of the positions count them, each for itself."""
    _change(patch, sinks=lambda sinks: sinks + math.log(2))


@_mutant
def sinks_of_other_heads(patch: pytest.MonkeyPatch) -> None:
    """As when ranks share out the heads, but not the sinks."""
    _change(patch, sinks=lambda sinks: sinks.roll(1))


@_mutant
def scaled_sinks(patch: pytest.MonkeyPatch) -> None:
    """Sinks are logits as they are: only products of queries and keys are scaled."""
    _change(patch, sinks=lambda sinks: sinks / 4)


@_mutant
def pages_of_the_other_group(patch: pytest.MonkeyPatch) -> None:
    """Layers with a window use the block table of those without, and the other way round."""
    original = KVCache.layer

    def swapped(self: KVCache, number: int, groups: Sequence[Any]) -> Any:
        return original(self, number, groups[::-1])

    patch.setattr(KVCache, "layer", swapped)


@_mutant
def blocks_given_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """Scheduler and workers agree to give each block back while all of it is still seen."""
    first_block, first_blocks = KVGroups.first_block, KVGroups.first_blocks

    def early(self: KVGroups, window: int, length: int) -> int:
        return first_block(self, window, length + self.block_size)

    def all_early(self: KVGroups, window: int, lengths: IntArray) -> IntArray:
        return first_blocks(self, window, lengths + self.block_size)

    patch.setattr(KVGroups, "first_block", early)
    patch.setattr(KVGroups, "first_blocks", all_early)
