"""EAGLE-3 draft heads (Li et al., 2025, arXiv 2503.01840).

What is kept of a position is `fc` of the model's residual stream after a few of its layers. The
first layer of the head reads that beside the embedding of the next token, and adds to it; what
comes out is at once the source of the logits and what the next draft is made of. P-EAGLE (2026,
arXiv 2602.01469) reads a mask token and a learned state for every further draft instead.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.parameters import Parameter, TensorSource
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

from .config import Eagle3Config

# Which targets there are, of no use here; and buffers.
IGNORED = (r"t2d", r"(midlayer|layers\.\d+)\.self_attn\.rotary_emb\.inv_freq")


def parameter_table(
    config: Eagle3Config, shard: Sharding, names: Set[str], model_width: int, *, tied: bool
) -> dict[str, Parameter]:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank.

    `model_width` is that of the hidden states it reads; `tied`: the model's output head is its
    embedding.
    """
    decoder, width, read = config.decoder, config.hidden_size, len(config.captured.chosen)
    whole = [("fc", ShardSlice(width, slice(0, width)))]
    table = {
        **shard.columns("fc", whole, read * model_width, bias=False),
        "norm": shard.whole("norm.weight", width),
        "0.hidden_norm": shard.whole(f"{_prefix(0, names)}hidden_norm.weight", width),
    }
    if config.norm_before_fc:
        table["fc_norm"] = shard.whole("input_norm.weight", read * model_width)
    if config.fc_norm:
        for k in range(read):
            table[f"fc_norm.{k}"] = shard.whole(f"fc_norm.{k}.weight", model_width)
    for i in range(decoder.num_layers):
        inputs = 2 * width if i == 0 else width
        table |= layer_table(f"{i}.", _prefix(i, names), decoder, shard, inputs)
    if config.mask_id is not None:
        source = TensorSource("mask_hidden", (1, read * model_width), slice(0, 1))
        table["mask_hidden"] = Parameter((1, read * model_width), (source,))
    drafted = config.draft_vocab_size
    return table | draft_vocabulary_table(decoder, drafted, shard, names, model_width, tied=tied)


def _prefix(layer: int, names: Set[str]) -> str:
    """Return the beginning of a layer's tensor names."""
    alone = any(name.startswith("midlayer.") for name in names)
    return "midlayer." if alone and layer == 0 else f"layers.{layer}."


class Eagle3Head:
    """The head on one rank, see DraftHead."""

    reads_hidden, capturable = True, True
    recurrent: RecurrentSpec | None = None

    def __init__(
        self,
        config: Eagle3Config,
        context: LayerContext[LlamaConfig],
        vocabulary: Vocabulary,
        first_cache_layer: int,
    ) -> None:
        """Take every parameter of the table from the context's weights.

        `vocabulary` is the model's; the head's keys and values lie in layers of the cache from
        `first_cache_layer` on. Raises InvalidRequest for a `d2t` that names tokens that do not
        exist.
        """
        decoder, weights = config.decoder, context.weights
        self._config, self._eps = config, decoder.rms_norm_eps
        self._ops, self._tp = context.kernels, context.shard.tp
        self.captured_layers, self.other_layers = config.captured.chosen, config.captured.other
        self.width = config.hidden_size
        self.kv_layers = draft_cache(context)
        self._fc_norms = _take_fc_norms(context, config)
        self._fc = take_linear(weights, "fc", context.kernels)
        self._hidden_norm = take_norm(context, "0.hidden_norm")
        layers = draft_layers(context, first_cache_layer)
        self._norm = take_norm(context, "norm")
        self._layers = LayerStack(context, layers, self._norm)
        own = DraftVocabulary(context, config.draft_vocab_size, vocabulary)
        self._embed, self._logits, self.token_ids = own.embed, own.logits, own.token_ids
        self._first, self.block = first_cache_layer, self._take_block(context)

    def _take_block(self, context: LayerContext[LlamaConfig]) -> BlockPass | None:
        """Take what stands for hidden states that are unknown, if the head drafts all at once."""
        mask_id = self._config.mask_id
        if mask_id is None:
            return None
        unknown = context.weights.take("mask_hidden")
        captured = unknown.chunk(len(self._config.captured.chosen), dim=1)
        with torch.no_grad():
            self._unknown = self.keep(unknown, [part.contiguous() for part in captured])
        return BlockPass(mask_id, self._draft, anchored=False)

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        """Return `fc` of the captured states, normalised first where the head does that."""
        ops, norms, eps = self._ops, self._fc_norms, self._eps
        if self._config.fc_norm:
            captured = [ops.rms_norm(x, n, eps) for x, n in zip(captured, norms, strict=True)]
        x = torch.cat(list(captured), dim=1)
        if self._config.norm_before_fc:
            x = ops.rms_norm(x, norms[0], eps)
        return ops.linear(x, self._fc)

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Return what the head adds up [T, H], before its last norm unless it is to be normed."""
        ops, eps, layers = self._ops, self._eps, self._layers
        embedded = ops.rms_norm(self._embed(batch.token_ids), layers.input_norm, eps)
        read = ops.rms_norm(hidden, self._hidden_norm, eps)
        x = torch.cat((embedded, read), dim=1)
        begins = read if self._config.norm_before_residual else hidden
        residual = Residual(begins, ops, self._tp, eps)
        x = layers(x, residual, batch, caches)
        return x if self._config.norm_output else residual.hidden

    def _draft(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Return the output [T, H] for tokens and hidden states that are unknown, see BlockPass."""
        causal = [1] * len(self._layers)
        hidden = self._unknown.repeat(len(batch.token_ids), 1)
        return self.forward(hidden, batch, Caches(caches.kv.in_groups(self._first, causal)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, D] over the tokens that the head can draft."""
        if not self._config.norm_output:
            hidden = self._ops.rms_norm(hidden, self._norm, self._eps)
        logits = self._logits(hidden)
        scale = self._config.logit_scale
        return logits if scale == 1.0 else logits * scale


def _take_fc_norms(context: LayerContext[LlamaConfig], config: Eagle3Config) -> list[Tensor]:
    """Take the norms of each captured state, or one of all of them, or none."""
    names = ["fc_norm"] if config.norm_before_fc else []
    if config.fc_norm:
        names = [f"fc_norm.{k}" for k in range(len(config.captured.chosen))]
    return [take_norm(context, name) for name in names]
