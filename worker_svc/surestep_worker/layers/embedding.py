"""The vocabulary of a model, its rows shared out among ranks: embedding and output head."""

from __future__ import annotations

import torch
from surestep_kernels import PackedLinear
from torch import Tensor
from torch.nn import functional

from surestep_worker.checkpoint.parameters import CheckpointWeights, Parameter
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext
from .linear import Sharding


def vocabulary_table(
    prefix: str, config: ModelConfig, shard: Sharding, *, head: bool
) -> dict[str, Parameter]:
    """Parameters of a model whose decoder's tensors begin with `prefix`; `head`: an untied one."""
    sizes = config.vocab_size, config.hidden_size
    table = {"embedding": shard.vocabulary(f"{prefix}embed_tokens.weight", *sizes)}
    if head:
        table["lm_head"] = shard.vocabulary("lm_head.weight", *sizes)
    return table


class Vocabulary:
    """This rank's rows: of V' on every rank, rank r holds the tokens r*V' to (r+1)*V'."""

    def __init__(self, context: LayerContext[ModelConfig]) -> None:
        config, weights, kernels = context.config, context.weights, context.kernels
        self._size = config.vocab_size
        self._linear = kernels.linear
        self._tp = context.shard.tp
        self._embedding = weights.take("embedding")
        tied = config.tie_word_embeddings and not config.is_backbone
        self.has_head = tied or "lm_head" in weights

        def pack(checkpoint: CheckpointWeights) -> PackedLinear:
            own = weights.in_host_memory("embedding") if tied else checkpoint.take("lm_head")
            return kernels.pack_linear(own, None)

        self._head = weights.take_packed("lm_head", pack) if self.has_head else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, and of what the model computes in."""
        return self._embedding.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of i64[T], on every rank."""
        table, tp = self._embedding, self._tp
        if tp.size == 1:
            return functional.embedding(token_ids, table)
        local = token_ids - tp.rank * len(table)
        elsewhere = (local < 0) | (local >= len(table))
        rows = functional.embedding(local.masked_fill(elsewhere, 0), table)
        return tp.all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank, with a head only."""
        assert self._head is not None
        local = self._linear(hidden, self._head, out_dtype=torch.float32)
        return self._tp.all_gather(local)[:, : self._size].contiguous()
