"""What a draft head is: a small model that reads hidden states of the one it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVHeads
from surestep_worker.layers.batch import StepBatch


class DraftHead(Protocol):
    """One rank's part of a head.

    Its row for position i is computed from what was kept of the model at i and from token i + 1,
    and has the keys and values of position i in its layers of the cache. For every further draft
    it is used again, on its own output in place of what was kept.
    """

    # After how many of the model's layers the residual stream is captured, ascending.
    captured_layers: tuple[int, ...]
    other_layers: tuple[int, ...] | None  # if its description can be read in another way
    width: int  # of what is kept of each position, and of the head's output
    kv_layers: tuple[KVHeads, ...]  # that it needs behind the model's
    token_ids: Tensor | None  # i64[D] of the model, for each id of the head's own; None: the same

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        """Return what is kept [T, width] of T tokens of the model.

        `hidden` [T, H] are the model's normed hidden states, `captured` [T, H] its residual stream
        after each of `captured_layers`.
        """

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Return the output [T, width] for positions i of the batch, whose tokens are i + 1.

        `hidden` [T, width] is what was kept of positions i, or the head's output for i - 1; it may
        be overwritten.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, D] of the token behind each, given outputs [N, width]."""
