"""EAGLE-3 draft heads (Li et al., 2025, arXiv 2503.01840).

What is kept of a position is `fc` of the model's residual stream after a few of its layers. The
first layer of the head reads that beside the embedding of the next token, and adds to it; what
comes out is at once the source of the logits and what the next draft is made of.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from surestep_common.errors import InvalidRequest
from torch import Tensor

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVHeads
from surestep_worker.checkpoint.parameters import Parameter, TensorSource
from surestep_worker.configs.model_config import SLIDING_ATTENTION
from surestep_worker.layers.attention import Attention, attention_table
from surestep_worker.layers.context import LayerContext, StepBatch
from surestep_worker.layers.decoder_layer import DecoderLayer, LayerStack
from surestep_worker.layers.embedding import Embedding, OutputHead, OutputRows, Vocabulary
from surestep_worker.layers.linear import Sharding, ShardSlice, take_linear
from surestep_worker.layers.mlp import GatedMlp, mlp_table
from surestep_worker.layers.residual import Residual, take_norm
from surestep_worker.models.llama.config import LlamaConfig

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
        to, at, inputs = f"{i}.", _prefix(i, names), 2 * width if i == 0 else width
        table[f"{to}input_norm"] = shard.whole(f"{at}input_layernorm.weight", width)
        table[f"{to}post_norm"] = shard.whole(f"{at}post_attention_layernorm.weight", width)
        table |= attention_table(f"{to}mixer.", f"{at}self_attn.", decoder, shard, inputs)
        inner, bias = decoder.intermediate_size, decoder.mlp_bias
        table |= mlp_table(f"{to}mlp.", f"{at}mlp.", width, inner, shard, bias=bias)
    return table | _vocabulary_table(config, shard, names, model_width, tied=tied)


def _prefix(layer: int, names: Set[str]) -> str:
    """Return the beginning of a layer's tensor names."""
    alone = any(name.startswith("midlayer.") for name in names)
    return "midlayer." if alone and layer == 0 else f"layers.{layer}."


def _vocabulary_table(
    config: Eagle3Config, shard: Sharding, names: Set[str], model_width: int, *, tied: bool
) -> dict[str, Parameter]:
    """Return the vocabulary that belongs to the head. Tokens outside it use the model's.

    Of an output head, fewer rows than the model has are taken only where those are an embedding's.
    """
    width, vocab, drafted = config.hidden_size, config.decoder.vocab_size, config.draft_vocab_size
    fewer = drafted != vocab
    table = dict[str, Parameter]()
    if "embed_tokens.weight" in names or width != model_width:
        table["embedding"] = shard.vocabulary("embed_tokens.weight", vocab, width)
    narrow = width != model_width and not _is_tied(config)
    if "lm_head.weight" in names or narrow or (fewer and not tied):
        table["lm_head"] = shard.vocabulary("lm_head.weight", drafted, width)
    if "d2t" in names or fewer:
        source = TensorSource("d2t", (drafted,), slice(0, drafted), dtypes=("I64", "I32"))
        table["d2t"] = Parameter((drafted,), (source,))
    return table


def _is_tied(config: Eagle3Config) -> bool:
    return config.decoder.tie_word_embeddings


class Eagle3Head:
    """The head on one rank, see DraftHead."""

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
        heads = KVHeads(max(1, decoder.num_kv_heads // self._tp.size), decoder.head_dim)
        self.kv_layers = (heads,) * decoder.num_layers
        self._fc_norms = _take_fc_norms(context, config)
        self._fc = take_linear(weights, "fc", context.kernels)
        self._hidden_norm = take_norm(context, "0.hidden_norm")
        layers = [
            _layer(f"{i}.", context, kind, first_cache_layer + i)
            for i, kind in enumerate(decoder.layer_types)
        ]
        self._norm = take_norm(context, "norm")
        self._layers = LayerStack(context, layers, self._norm)
        self._embed, self._logits = vocabulary.embed, vocabulary.logits
        if "embedding" in weights:
            self._embed = Embedding(context)
        self.token_ids = _take_token_ids(context, config) if "d2t" in weights else None
        tied = _is_tied(config) and self._embed is not vocabulary.embed
        if tied or "lm_head" in weights:
            own = "lm_head" in weights
            self._logits = OutputHead(context, config.draft_vocab_size, tied=not own)
        elif config.draft_vocab_size != decoder.vocab_size:
            assert self.token_ids is not None
            self._logits = OutputRows(context, vocabulary.embed, self.token_ids)

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

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits f32[N, D] over the tokens that the head can draft."""
        if not self._config.norm_output:
            hidden = self._ops.rms_norm(hidden, self._norm, self._eps)
        logits = self._logits(hidden)
        scale = self._config.logit_scale
        return logits if scale == 1.0 else logits * scale


def _layer(
    to: str, context: LayerContext[LlamaConfig], kind: str, cache_layer: int
) -> DecoderLayer:
    window = context.config.sliding_window if kind == SLIDING_ATTENTION else None
    mixer = Attention(f"{to}mixer.", context, cache_layer, window=window or 0)
    return DecoderLayer(to, context, mixer, GatedMlp(f"{to}mlp.", context))


def _take_fc_norms(context: LayerContext[LlamaConfig], config: Eagle3Config) -> list[Tensor]:
    """Take the norms of each captured state, or one of all of them, or none."""
    names = ["fc_norm"] if config.norm_before_fc else []
    if config.fc_norm:
        names = [f"fc_norm.{k}" for k in range(len(config.captured.chosen))]
    return [take_norm(context, name) for name in names]


def _take_token_ids(context: LayerContext[LlamaConfig], config: Eagle3Config) -> Tensor:
    """The model's id i64[D] of each token that the head can draft; `d2t` holds the differences."""

    def to_ids(offsets: Tensor) -> Tensor:
        ids = offsets + torch.arange(len(offsets))
        low, high, size = int(ids.min()), int(ids.max()), config.decoder.vocab_size
        if not 0 <= low <= high < size or len(ids.unique()) != len(ids):
            raise InvalidRequest(
                f"d2t does not name {len(ids)} different tokens of {size}, but ids from {low} to "
                f"{high}",
                param="speculative_config",
            )
        return ids

    return context.weights.take("d2t", torch.int64, to_ids)
