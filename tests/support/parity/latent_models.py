"""Models of the parity matrix with latent attention, and bugs of it, put back one at a time; see
mutants.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints.deepseek import make_tiny_deepseek
from support.parity.cases import EOS, VOCAB
from surestep_kernels.latent_attention import store_latents
from surestep_kernels.latent_choice import latent_choice_reference
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.layers import latent_attention
from surestep_worker.layers.latent_attention import Indexer, LatentAttention
from surestep_worker.layers.moe import SparseMoe
from torch import Tensor

_SIZES: dict[str, Any] = {"vocab": VOCAB, "eos_token_ids": (EOS,), "seed": 7}


def make_glm_dsa(folder: Path) -> None:
    """Latent attention to 8 positions, which every other layer and an MTP layer choose."""
    make_tiny_deepseek(folder, "glm_moe_dsa", num_hidden_layers=3, **_SIZES)


def make_glm_with_ties(folder: Path) -> None:
    """The same, but one head scores: 0 for about half of all positions, where most ties are."""
    make_tiny_deepseek(folder, "glm_moe_dsa", num_hidden_layers=2, index_n_heads=1, **_SIZES)


def make_deepseek_v3(folder: Path) -> None:
    """Latent attention to all positions, experts in groups, and an MTP layer."""
    make_tiny_deepseek(folder, num_hidden_layers=2, **_SIZES)


LATENT_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _mutant(mutate: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    LATENT_MUTANTS[mutate.__name__] = mutate
    return mutate


def _change_choice(
    patch: pytest.MonkeyPatch, change: Callable[[Any, tuple[Any, ...]], Any]
) -> None:
    """Have indexers choose by `change(choose, its arguments)`."""
    original = Indexer.__call__

    @wraps(original)
    def changed(self: Indexer, *args: Any) -> Any:
        choose = self._choose
        self._choose = lambda *given: change(choose, given)
        try:
            return original(self, *args)
        finally:
            self._choose = choose

    patch.setattr(Indexer, "__call__", changed)


def _in_windows(rows: AttentionRows, shift: int) -> AttentionRows:
    """Rows of several tokens, behind the first position, seem to begin elsewhere."""
    several = (rows.cu_rows.diff() > 1) & (rows.start > 0)
    return rows._replace(start=torch.where(several, rows.start + shift, rows.start))


@_mutant
def choice_of_a_window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A row of a window does not see itself when it chooses."""
    _change_choice(
        patch, lambda choose, given: choose(*given[:3], _in_windows(given[3], -1), given[4])
    )


@_mutant
def one_choice_for_a_window(patch: pytest.MonkeyPatch) -> None:
    """All rows of a window attend to what its first row chose."""

    def change(choose: Any, given: tuple[Any, ...]) -> Any:
        chosen, rows = choose(*given), given[3]
        borders = rows.cu_rows.tolist()
        for start, first, end in zip(rows.start.tolist(), borders, borders[1:], strict=False):
            if start >= given[4]:
                chosen[first:end] = chosen[first]
        return chosen

    _change_choice(patch, change)


@_mutant
def index_keys_of_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    """An index key is written once: what a rejected draft left is not replaced."""

    def keeping(x: Tensor, pages: Tensor, kv_slots: Tensor) -> None:
        lines = pages.view(-1, pages.shape[-1])
        kept = lines[kv_slots].clone()
        store_latents(x, pages, kv_slots)
        old = ~kept.isnan().any(dim=1) & (kept != 0).any(dim=1)
        lines[kv_slots[old]] = kept[old]

    patch.setattr(latent_attention, "store_latents", keeping)


@_mutant
def mask_of_a_window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Rows of a window see one position more than their own."""
    original = LatentAttention.__call__

    @wraps(original)
    def changed(self: LatentAttention, x: Tensor, batch: Any, caches: Any) -> Any:
        groups = tuple(g._replace(rows=_in_windows(g.rows, 1)) for g in batch.groups)
        return original(self, x, replace(batch, groups=groups), caches)

    patch.setattr(LatentAttention, "__call__", changed)


LATENT_RANK_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}  # of one rank of several


def _rank_mutant(
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> Callable[[pytest.MonkeyPatch], None]:
    LATENT_RANK_MUTANTS[mutate.__name__] = mutate
    return mutate


@_rank_mutant
def ties_to_the_highest_positions(patch: pytest.MonkeyPatch) -> None:
    """Of equal scores the highest positions win: the reference reads scores from behind."""

    def sort(original: Any, scores: Tensor, **how: Any) -> Any:
        order = original(scores.flip(0), **how).indices
        return SimpleNamespace(indices=len(scores) - 1 - order)

    def change(choose: Any, given: tuple[Any, ...]) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(torch, "sort", partial(sort, torch.sort))
            return latent_choice_reference(*given)

    _change_choice(patch, change)


@_rank_mutant
def experts_of_a_rank_dropped(patch: pytest.MonkeyPatch) -> None:
    """What a rank's routed experts make of a token is not in the sum."""
    original = SparseMoe.__call__

    @wraps(original)
    def changed(self: SparseMoe, x: Tensor) -> Any:
        mixed = original(self, x)
        mixed.mixture.weights.zero_()
        return mixed

    patch.setattr(SparseMoe, "__call__", changed)
