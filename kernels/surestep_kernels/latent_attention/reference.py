"""Attention to latents: all heads read one vector of each position, and of it its first elements
as the value (DeepSeek-V2, 2024, section 2.1, in the absorbed form).

Pages are [blocks, block_size, width]: a position is one line of them. They may be FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8, FP8_MAX


class Attend(Protocol):
    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        rows: AttentionRows,
        scale: float,
        value_width: int,
        chosen: Tensor | None = None,
    ) -> Tensor: ...


def store_latents(x: Tensor, pages: Tensor, kv_slots: Tensor) -> None:
    """Write x [T, D] to the flat slots i64[T] = block * block_size + offset.

    FP8 pages saturate at +-448; NaN stays NaN.
    """
    if pages.dtype is FP8:
        x = x.float().clamp(-FP8_MAX, FP8_MAX)
    pages.view(-1, pages.shape[-1])[kv_slots] = x.to(pages.dtype)


def attend_reference(
    q: Tensor,
    pages: Tensor,
    rows: AttentionRows,
    scale: float,
    value_width: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Attend q [T, H, D] to the latents; return [T, H, value_width].

    The i-th token of row r sees the positions 0..start[r]+i. With `chosen` i32[T, K] it sees those
    alone that its line names, in ascending order; where it sees no more than K, all of them. What
    it does not see never influences its result. That of tokens of no row is undefined.
    """
    out = q.new_zeros(*q.shape[:2], value_width)
    for token, positions, table in tokens_of(rows):
        seen = positions if chosen is None else chosen[token, : len(positions)].long()
        keys = read_latents(pages, table, seen)
        weights = (q[token].float() @ keys.T * scale).softmax(dim=-1)
        out[token] = (weights @ keys[:, :value_width]).to(q.dtype)
    return out


def tokens_of(rows: AttentionRows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield every token of a row, the positions that it may see, and its row of the block table."""
    borders = rows.cu_rows.tolist()
    for row, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.start.tolist(), strict=True)):
        for token in range(borders[row], borders[row + 1]):
            last = start + token - borders[row]
            yield token, torch.arange(last + 1, device=rows.cu_rows.device), rows.block_tables[slot]


def read_latents(pages: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Return what pages hold of positions i64[L]: f32[L, D]."""
    block_size = pages.shape[1]
    return pages[table[positions // block_size].long(), positions % block_size].float()
