"""DFlash drafters (2026, arXiv 2602.06036): block diffusion in one pass.

What is kept of a position is the normed `fc` of the model's residual stream after a few of its
layers. Every layer makes keys and values of that for its context. A window is drafted from the
newest token and as many mask tokens as there are to be drafts: they see the context, and each
other in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.layers.context import LayerContext, Residual, StepBatch, take_norm
from surestep_worker.layers.decoder_layer import LayerStack
from surestep_worker.layers.draft_head import BlockPass, draft_cache, draft_layers
from surestep_worker.layers.embedding import (
    DraftVocabulary,
    Vocabulary,
    draft_vocabulary_table,
)
from surestep_worker.layers.linear import Sharding, ShardSlice, take_linear
from surestep_worker.models.llama.config import LlamaConfig
from surestep_worker.models.llama.table import layer_table

from .config import DFlashConfig

IGNORED = (r"t2d", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def parameter_table(
    config: DFlashConfig, shard: Sharding, names: Set[str], model_width: int, *, tied: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank.

    `model_width` is that of the hidden states it reads; `tied`: the model's output head is its
    embedding.
    """
    decoder, width = config.decoder, config.decoder.hidden_size
    whole = [("fc", ShardSlice(width, slice(0, width)))]
    table = {
        **shard.columns("fc", whole, len(config.captured.chosen) * model_width, bias=False),
        "hidden_norm": shard.whole("hidden_norm.weight", width),
        "norm": shard.whole("norm.weight", width),
    }
    for i in range(decoder.num_layers):
        table |= layer_table(f"{i}.", f"layers.{i}.", decoder, shard)
    drafted = config.draft_vocab_size
    return table | draft_vocabulary_table(decoder, drafted, shard, names, model_width, tied=tied)


class DFlashHead:
    """The drafter on one rank, see DraftHead."""

    reads_hidden, capturable = True, True
    recurrent: RecurrentSpec | None = None

    def __init__(
        self,
        config: DFlashConfig,
        context: LayerContext[LlamaConfig],
        vocabulary: Vocabulary,
        first_cache_layer: int,
    ) -> None:
        """Take every parameter of the table from the context's weights.

        `vocabulary` is the model's; the drafter's keys and values lie in layers of the cache from
        `first_cache_layer` on. Raises InvalidRequest for a `d2t` that names tokens that do not
        exist.
        """
        decoder = config.decoder
        self._eps, self._ops, self._tp = decoder.rms_norm_eps, context.kernels, context.shard.tp
        self.captured_layers, self.other_layers = config.captured.chosen, config.captured.other
        self.width = decoder.hidden_size
        self.kv_layers = draft_cache(context)
        self._first, self._causal = first_cache_layer, config.causal
        self._fc = take_linear(context.weights, "fc", context.kernels)
        self._hidden_norm = take_norm(context, "hidden_norm")
        self._context = draft_layers(context, first_cache_layer)
        self._layers = LayerStack(context, self._context, take_norm(context, "norm"))
        own = DraftVocabulary(context, config.draft_vocab_size, vocabulary)
        self._embed, self._logits, self.token_ids = own.embed, own.logits, own.token_ids
        self._unsaid = _index_of(config.mask_id, self.token_ids)
        self.block: BlockPass | None = BlockPass(config.mask_id, self._draft, anchored=True)

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        """Return the normed `fc` of the captured states."""
        read = self._ops.linear(torch.cat(list(captured), dim=1), self._fc)
        return self._ops.rms_norm(read, self._hidden_norm, self._eps)

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Make keys and values of what was kept of positions, in every layer; return that."""
        for layer in self._context:
            layer.store(hidden, batch, caches)
        return hidden

    def _draft(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Return the normed hidden states [T, H] of a block, see BlockPass."""
        seen = Caches(caches.kv.in_groups(self._first, self._causal))
        residual = Residual(self._embed(batch.token_ids), self._ops, self._tp, self._eps)
        x = residual.normed(self._layers.input_norm)
        return self._layers(x, residual, batch, seen)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, D] over the tokens that can be drafted; the mask is none of them."""
        logits = self._logits(hidden)
        logits[:, self._unsaid] = -torch.inf
        return logits


def _index_of(mask_id: int, token_ids: Tensor | None) -> slice:
    """Return where the logit of the mask token is, if there is one."""
    if token_ids is None:
        return slice(mask_id, mask_id + 1)
    first = int((token_ids < mask_id).sum())
    return slice(first, first + int((token_ids == mask_id).any()))
