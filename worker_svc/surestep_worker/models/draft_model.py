"""A whole model in the place of a draft head.

It has its own embedding, layers and output head, and its keys and values lie behind those of the
model it drafts for, in the same blocks. Its pass is that of the model served alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVHeads, LatentWidths
from surestep_worker.layers.context import StepBatch
from surestep_worker.layers.draft_head import BlockPass

from .loader import Model


class DraftModel:
    """The model on one rank, see DraftHead.

    Behind its own context it sees all tokens as if they were at the last position it knows: such
    drafts are worth little, and cost no error.
    """

    reads_hidden = False
    captured_layers: tuple[int, ...] = ()
    other_layers: tuple[int, ...] | None = None
    token_ids: Tensor | None = None
    block: BlockPass | None = None

    def __init__(
        self, model: Model, *, first_cache_layer: int, num_positions: int, vocab_size: int
    ) -> None:
        """Take a model that was loaded for `num_positions`, to draft for one with `vocab_size`
        tokens whose cache it has from `first_cache_layer` on."""
        self._model, self._first = model, first_cache_layer
        self._last, self._vocab_size = num_positions - 1, vocab_size
        self.width, self.capturable = model.config.hidden_size, model.capturable
        self.recurrent = model.recurrent_spec()
        spec = model.kv_spec(1)
        own = KVHeads(spec.num_kv_heads, spec.head_dim)
        self.kv_layers: tuple[KVHeads | LatentWidths, ...] = spec.latents or (own,) * len(
            spec.windows
        )

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        """Return nothing [T, 0]: of the model it drafts for it reads the tokens alone."""
        return hidden[:, :0]

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Return the normed hidden states [T, H] of the batch's tokens; `hidden` is not read."""
        known = replace(batch, positions=batch.positions.clamp(max=self._last))
        return self._model.forward(known, Caches(caches.kv.from_layer(self._first), caches.draft))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, D] of tokens that both models have."""
        return self._model.logits(hidden)[:, : self._vocab_size].contiguous()
