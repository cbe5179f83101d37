"""Token embeddings whose rows are shared out among the ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from surestep_worker.tp import TensorParallel


def embed(token_ids: Tensor, table: Tensor, tp: TensorParallel) -> Tensor:
    """Rows of the vocabulary for i64[T], [T, H] on every rank.

    `table` [V', H] is this rank's part: rank r holds the tokens r*V' to (r+1)*V'.
    """
    if tp.size == 1:
        return functional.embedding(token_ids, table)
    local = token_ids - tp.rank * len(table)
    elsewhere = (local < 0) | (local >= len(table))
    rows = functional.embedding(local.masked_fill(elsewhere, 0), table)
    return tp.all_reduce(rows.masked_fill(elsewhere[:, None], 0))
