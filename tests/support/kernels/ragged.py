"""Rows of different lengths in one batch: decode rows, windows and prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from support.kernels.cases import Context, row_bounds
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

LENGTHS, COUNTS = [1, 17, 64, 70, 150, 333], [1, 5, 1, 3, 100, 2]  # seen by, and of, each row


def batch_of(context: Context) -> AttentionRows:
    """The rows together."""
    start = torch.tensor(LENGTHS) - torch.tensor(COUNTS)
    numbers = torch.arange(len(COUNTS)), row_bounds(COUNTS), start.int(), max(COUNTS)
    return AttentionRows(context.block_tables, *numbers)


def tokens_alone(context: Context) -> Iterator[tuple[int, AttentionRows]]:
    """Each token of the batch, by its index, as a row of its own."""
    places = (
        (row, position)
        for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
        for position in range(length - count, length)
    )
    for token, (row, position) in enumerate(places):
        rows = torch.tensor([row]), row_bounds([1]), torch.tensor([position]).int(), 1
        yield token, AttentionRows(context.block_tables, *rows)


def attends_alike_alone(
    kernels: KernelSet,
    q: Tensor,
    cache: LayerCache,
    context: Context,
    made: Tensor,
    **options: object,
) -> bool:
    """Whether every token has the same bits alone as in `made`, the result of the batch."""
    return all(
        torch.equal(attend(kernels, q[token : token + 1], cache, rows, **options)[0], made[token])
        for token, rows in tokens_alone(context)
    )


def attend(
    kernels: KernelSet, q: Tensor, cache: LayerCache, rows: AttentionRows, **options: object
) -> Tensor:
    """Attention with scores scaled as they usually are."""
    return kernels.paged_attention(q, cache, rows, q.shape[2] ** -0.5, **options)  # type: ignore[arg-type]
