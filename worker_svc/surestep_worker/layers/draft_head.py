"""Draft heads: small models that read hidden states of the model they draft for.

The one here is the multi-token prediction head of DeepSeek-V3 (2024, section 2.2), GLM, MiMo,
Qwen3-Next and Qwen3.5: one decoder layer that predicts token i + 2 from the model's hidden state at
i and token i + 1. It is used again on its own output for further tokens. Embedding and output head
are the model's, where the checkpoint has none for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVHeads, LatentWidths
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.configs.model_config import SLIDING_ATTENTION, ModelConfig

from .attention import Attention
from .context import LayerContext, Residual, StepBatch, take_norm
from .decoder_layer import DecoderLayer, LayerStack
from .embedding import Embedding, OutputHead, Vocabulary
from .linear import take_linear
from .mlp import GatedMlp


class BlockPass(NamedTuple):
    """Pass that drafts all tokens of a window.

    Its rows begin with the newest token, if it is `anchored`, and go on with mask tokens. The KV
    groups of its batch are two: each row sees its whole block in the first, and none behind itself
    in the second.
    """

    mask_id: int  # token in the place of those that are to be drafted
    run: Callable[[StepBatch, Caches], Tensor]  # returns the outputs [T, width]
    # The row of a draft is its mask token's; else that of the token before, from the newest
    # committed position on, which is caught up with.
    anchored: bool


class DraftHead(Protocol):
    """Part of a draft head on a rank.

    Its row for position i is computed from what was kept of the model at i and from token i + 1,
    and has the keys and values of position i in its layers of the cache. For every further draft
    it is used again, on its own output in place of what was kept, or all are made by its `block`. A
    head that reads no hidden states computes row i from token i alone.
    """

    reads_hidden: bool
    capturable: bool  # CUDA graphs can hold its passes
    # After how many of the model's layers the residual stream is captured, ascending.
    captured_layers: tuple[int, ...]
    other_layers: tuple[int, ...] | None  # if its description can be read in another way
    width: int  # of what is kept of each position if it reads that, and of the head's output
    kv_layers: tuple[KVHeads | LatentWidths, ...]  # that it needs behind the model's
    recurrent: RecurrentSpec | None  # states that it needs, of a model with recurrent layers
    token_ids: Tensor | None  # i64[D] of the model, for each id of the head's own; None: the same
    block: BlockPass | None  # None: it drafts one token after the other

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


PREFIX = "mtp."  # of its parameters


class MtpHead:
    """The head on one rank, see DraftHead; its layer of the cache is the last of the model's."""

    reads_hidden, capturable = True, True
    other_layers: tuple[int, ...] | None = None
    kv_layers: tuple[KVHeads | LatentWidths, ...] = ()
    recurrent: RecurrentSpec | None = None
    token_ids: Tensor | None = None
    block: BlockPass | None = None

    def __init__(
        self,
        context: LayerContext[ModelConfig],
        layer: DecoderLayer,
        vocabulary: Vocabulary,
        norm: Tensor | None = None,
    ) -> None:
        """`norm` f32[H] of its output is its own unless it is given."""
        config, weights = context.config, context.weights
        self.width = config.hidden_size
        self._embed, self._logits = vocabulary.embed, vocabulary.logits
        if PREFIX + "embedding" in weights:
            self._embed = Embedding(context, PREFIX + "embedding")
        if PREFIX + "lm_head" in weights:
            self._logits = OutputHead(context, config.vocab_size, name=PREFIX + "lm_head")
        self._traits = config.mtp
        self.captured_layers = (config.num_layers,) * config.mtp.before_norm
        self._ops = context.kernels
        self._tp = context.shard.tp
        self._eps = config.rms_norm_eps
        self._fc = take_linear(weights, PREFIX + "fc", context.kernels)
        self._norm_embedding = take_norm(context, PREFIX + "norm_embedding")
        self._norm_hidden = take_norm(context, PREFIX + "norm_hidden")
        norm = take_norm(context, PREFIX + "norm") if norm is None else norm
        self._layer = LayerStack(context, [layer], norm)

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        """Return the model's normed hidden states, as they are, or what was normed."""
        return captured[0] if captured else hidden

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        """Return normed hidden states [T, H] whose logits predict the token after the next."""
        ops = self._ops
        next_embedding = self._embed(batch.token_ids)
        embedded = ops.rms_norm(next_embedding, self._norm_embedding, self._eps)
        if self._traits.blind_at_first:
            embedded.masked_fill_((batch.positions == 0)[:, None], 0)
        seen = ops.rms_norm(hidden, self._norm_hidden, self._eps)
        halves = (seen, embedded) if self._traits.hidden_first else (embedded, seen)
        joined = ops.linear(torch.cat(halves, dim=1), self._fc)
        residual = Residual(joined, ops, self._tp, self._eps)
        x = residual.normed(self._layer.input_norm)
        return self._layer(x, residual, batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, V] of tokens as the model knows them."""
        return self._logits(hidden)


def draft_layers(context: LayerContext[ModelConfig], first_cache_layer: int) -> list[DecoderLayer]:
    """Make the layers of a head, which have the caches from `first_cache_layer` on."""
    config, layers = context.config, list[DecoderLayer]()
    for i, kind in enumerate(config.layer_types):
        window = (config.sliding_window or 0) if kind == SLIDING_ATTENTION else 0
        mixer = Attention(f"{i}.mixer.", context, first_cache_layer + i, window=window)
        layers.append(DecoderLayer(f"{i}.", context, mixer, GatedMlp(f"{i}.mlp.", context)))
    return layers


def draft_cache(context: LayerContext[ModelConfig]) -> tuple[KVHeads | LatentWidths, ...]:
    """Return what the layers of a head keep of a token on this rank."""
    config = context.config
    heads = max(1, config.num_kv_heads // context.shard.tp.size)
    return (KVHeads(heads, config.head_dim),) * config.num_layers
