"""The vocabulary of a model, its rows shared out among ranks: embedding and output head.

Of V' rows on every rank, rank r holds the tokens r*V' to (r+1)*V'.
"""

from __future__ import annotations

import torch
from surestep_kernels import PackedLinear
from torch import Tensor
from torch.nn import functional

from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext
from .linear import Sharding, pack

_HEAD_BITS = 8  # of a head that is rounded: with fewer, near-equal logits would change places


def vocabulary_table(
    prefix: str, config: ModelConfig, shard: Sharding, *, head: bool
) -> dict[str, Parameter]:
    """Parameters of a model whose decoder's tensors begin with `prefix`; `head`: an untied one."""
    sizes = config.vocab_size, config.hidden_size
    embedding = shard.vocabulary(f"{prefix}embed_tokens.weight", *sizes)
    table = {"embedding": embedding._replace(table=True, least_bits=_HEAD_BITS)}
    if head:
        table["lm_head"] = head_of(shard.vocabulary("lm_head.weight", *sizes))
    return table


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
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        local = self._linear(hidden, self._packed, out_dtype=torch.float32)
        return self._tp.all_gather(local)[:, : self._size].contiguous()


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
        self.tied = config.tie_word_embeddings and not config.is_backbone
        self.has_head = self.tied or "lm_head" in context.weights
        self._head = (
            OutputHead(context, config.vocab_size, tied=self.tied) if self.has_head else None
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and of the model's computation."""
        return self.embed.table.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank, with a head only."""
        assert self._head is not None
        return self._head(hidden)
