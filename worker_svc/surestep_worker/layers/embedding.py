"""The vocabulary of a model, its rows shared out among ranks: embedding and output head.

Of V' rows on every rank, rank r holds the tokens r*V' to (r+1)*V'. The vocabulary of a draft head
may have fewer tokens than the model's, and tables of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import PackedLinear
from torch import Tensor
from torch.nn import functional

from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter, TensorSource
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext
from .linear import Sharding, pack

_HEAD_BITS = 8  # of a head that is rounded: with fewer, near-equal logits would change places


def vocabulary_table(
    prefix: str, config: ModelConfig, shard: Sharding, *, head: bool
) -> dict[str, Parameter]:
    """Parameters of a model whose decoder's tensors begin with `prefix`; `head`: an untied one."""
    sizes = config.vocab_size, config.hidden_size
    table = {"embedding": embedding_of(shard.vocabulary(f"{prefix}embed_tokens.weight", *sizes))}
    if head:
        table["lm_head"] = head_of(shard.vocabulary("lm_head.weight", *sizes))
    return table


def embedding_of(rows: Parameter) -> Parameter:
    """Return the parameter of an embedding."""
    return rows._replace(table=True, least_bits=_HEAD_BITS)


def head_of(rows: Parameter) -> Parameter:
    """Return the parameter of an output head."""
    return rows._replace(linear=True, least_bits=_HEAD_BITS)


class Embedding:
    """A parameter that is looked up in: this rank's rows."""

    def __init__(self, context: LayerContext[ModelConfig], name: str = "embedding") -> None:
        self.tp = context.shard.tp
        self.table = context.weights.take(name)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T], on every rank."""
        if self.tp.size == 1:
            return functional.embedding(token_ids, self.table)
        return self.tp.all_reduce(self.own_rows(token_ids))

    def own_rows(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T], zero for tokens of other ranks."""
        local = token_ids - self.tp.rank * len(self.table)
        elsewhere = (local < 0) | (local >= len(self.table))
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.table)
        return rows.masked_fill(elsewhere[:, None], 0)


class ScaledEmbedding(Embedding):
    """The parameter of another embedding, its rows multiplied when they are looked up."""

    def __init__(self, plain: Embedding, scale: float) -> None:
        self.tp, self.table, self._scale = plain.tp, plain.table, scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T], on every rank."""
        return super().__call__(token_ids).mul_(self._scale)


class OutputHead:
    """The parameter `name`, or the embedding where they are tied: this rank's rows."""

    def __init__(
        self,
        context: LayerContext[ModelConfig],
        vocab_size: int,
        *,
        tied: bool = False,
        name: str = "lm_head",
    ) -> None:
        weights, kernels = context.weights, context.kernels
        self._size, self._linear, self._tp = vocab_size, kernels.linear, context.shard.tp

        def read(checkpoint: CheckpointWeights) -> PackedLinear:
            if tied:
                own = checkpoint.quantized("embedding") or weights.in_host_memory("embedding")
            else:
                own = checkpoint.take_linear(name)
            return pack(kernels, own, None, checkpoint.dtype)

        self._packed = weights.take_packed(name, read)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H] on rank 0, which chooses for all; zeros on the others."""
        local = self._linear(hidden, self._packed, out_dtype=torch.float32)
        return self._tp.gather_to_first(local, self._size)


class OutputRows:
    """The rows of some tokens in an output head that is the embedding."""

    def __init__(
        self, context: LayerContext[ModelConfig], embedding: Embedding, token_ids: Tensor
    ) -> None:
        """`context` is that of the layers which use them, `embedding` that of the model."""
        kernels, self._tp = context.kernels, embedding.tp
        self._linear = kernels.linear

        def rows(checkpoint: CheckpointWeights) -> PackedLinear:
            own = checkpoint.as_linear(embedding.own_rows(token_ids).cpu())
            return pack(kernels, own, None, checkpoint.dtype)

        self._packed = context.weights.take_packed("lm_head", rows)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, D] of [N, H], for all D tokens on every rank."""
        return self._tp.all_reduce(self._linear(hidden, self._packed, out_dtype=torch.float32))


class Vocabulary:
    """Both, of one model."""

    def __init__(self, context: LayerContext[ModelConfig]) -> None:
        config = context.config
        self.embed = Embedding(context)
        scale = config.embedding_scale(self.dtype)
        if scale != 1.0:
            self.embed = ScaledEmbedding(self.embed, scale)
        self.tied = config.tie_word_embeddings and not config.is_backbone
        self.has_head = self.tied or "lm_head" in context.weights
        self._head = _output(context, tied=self.tied) if self.has_head else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and of the model's computation."""
        return self.embed.table.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank, with a head only."""
        assert self._head is not None
        return self._head(hidden)


def _output(context: LayerContext[ModelConfig], *, tied: bool) -> Callable[[Tensor], Tensor]:
    """Return the model's output head, with the divisor and the soft cap of its logits."""
    config, soft_cap = context.config, context.kernels.soft_cap
    head = OutputHead(context, config.vocab_size, tied=tied)
    divisor, cap = config.logits_divisor, config.logits_softcap
    if divisor == 1.0 and not cap:
        return head

    def finished(hidden: Tensor) -> Tensor:
        logits = head(hidden).div_(divisor)
        if cap:
            soft_cap(logits, cap)
        return logits

    return finished


def draft_vocabulary_table(
    decoder: ModelConfig,
    drafted: int,
    shard: Sharding,
    names: Set[str],
    model_width: int,
    *,
    tied: bool,
) -> dict[str, Parameter]:
    """Return the vocabulary that belongs to a draft head. Tokens outside it use the model's.

    Of an output head, fewer rows than the model has are taken only where those are an embedding's:
    `tied`.
    """
    width, vocab = decoder.hidden_size, decoder.vocab_size
    fewer = drafted != vocab
    table = dict[str, Parameter]()
    if "embed_tokens.weight" in names or width != model_width:
        table["embedding"] = shard.vocabulary("embed_tokens.weight", vocab, width)
    narrow = width != model_width and not decoder.tie_word_embeddings
    if "lm_head.weight" in names or narrow or (fewer and not tied):
        table["lm_head"] = shard.vocabulary("lm_head.weight", drafted, width)
    if "d2t" in names or fewer:
        source = TensorSource("d2t", (drafted,), slice(0, drafted), dtypes=("I64", "I32"))
        table["d2t"] = Parameter((drafted,), (source,))
    return table


class DraftVocabulary:
    """The vocabulary of a draft head on one rank."""

    def __init__(self, context: LayerContext[ModelConfig], drafted: int, model: Vocabulary) -> None:
        """Take the parameters of the table; what it lacks is the model's.

        Raises InvalidRequest for a `d2t` that names tokens that do not exist.
        """
        decoder, weights = context.config, context.weights
        self.embed, self.logits = model.embed, model.logits
        if "embedding" in weights:
            self.embed = Embedding(context)
        self.token_ids = _take_token_ids(context) if "d2t" in weights else None
        tied = decoder.tie_word_embeddings and self.embed is not model.embed
        if tied or "lm_head" in weights:
            own = "lm_head" in weights
            self.logits = OutputHead(context, drafted, tied=not own)
        elif drafted != decoder.vocab_size:
            assert self.token_ids is not None
            self.logits = OutputRows(context, model.embed, self.token_ids)


def _take_token_ids(context: LayerContext[ModelConfig]) -> Tensor:
    """The model's id i64[D] of each token that the head can draft; `d2t` holds the differences."""

    def to_ids(offsets: Tensor) -> Tensor:
        ids = offsets + torch.arange(len(offsets))
        low, high, size = int(ids.min()), int(ids.max()), context.config.vocab_size
        if not 0 <= low <= high < size or len(ids.unique()) != len(ids):
            raise InvalidRequest(
                f"d2t does not name {len(ids)} different tokens of {size}, but ids from {low} to "
                f"{high}",
                param="speculative_config",
            )
        return ids

    return context.weights.take("d2t", torch.int64, to_ids)
