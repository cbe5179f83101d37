"""Prompt lookup in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.columns.cpu.binding import CFunction, Library, pointers

from .reference import NgramDrafts, RecentTexts


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.long("ngram", "9P 8l")
    return {"ngram": partial(ngram, run)}


def ngram(
    run: CFunction,
    tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    max_drafts: Tensor,
    *,
    num_drafts: int,
    max_n: int,
    min_n: int,
    recent: RecentTexts | None = None,
) -> NgramDrafts:
    assert tokens.is_contiguous()
    assert tokens.dtype is torch.int32
    rows, dtype = len(slots), slots.dtype
    ids = torch.empty(rows, num_drafts, dtype=torch.int32)
    counts = torch.empty(rows, dtype=torch.int32)
    columns = [_words(column) for column in (slots, lengths, max_drafts)]
    if recent is None:
        none = torch.full((rows,), -1, dtype=torch.int32)
        recent = RecentTexts(none.unsqueeze(0), none, none, min_n)
    assert recent.tokens.is_contiguous()
    sizes = rows, *tokens.shape, num_drafts, max_n, min_n
    texts = recent.tokens, recent.lengths, recent.line
    run(
        *pointers(ids, counts, tokens, *columns, *texts),
        *sizes,
        recent.tokens.shape[1],
        recent.min_n,
    )
    return NgramDrafts(ids.to(dtype), counts.to(dtype))


def _words(column: Tensor) -> Tensor:
    """Return the column as i32; an index beyond that range does not exist anyway."""
    return column if column.dtype is torch.int32 else column.clamp(-1, (1 << 31) - 1).int()
