"""Causal attention of a ragged batch over the paged KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class AttentionRows(NamedTuple):
    """R rows of T tokens. Row r owns tokens cu_rows[r]:cu_rows[r+1]."""

    block_tables: Tensor  # i32[R, B] pages of each row in order of position
    cu_rows: Tensor  # i32[R+1] first token of each row, then T
    start: Tensor  # i32[R] committed length: position of the row's first token
    max_tokens: int  # most tokens of a row, or more: known on the host, it sizes launches


class PagedAttention(Protocol):
    """See paged_attention_reference."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float
    ) -> Tensor: ...


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: AttentionRows,
    scale: float,
) -> Tensor:
    """Attend q [T, Hq, D] to the cached keys and values; returns [T, Hq, D].

    The i-th token of row r sees the KV positions 0..start[r]+i. Positions that no token of the
    row sees never reach the result, whatever they hold.
    """
    block_tables, cu_rows, start, _ = rows
    counts = (cu_rows[1:] - cu_rows[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)  # [T]
    index = torch.arange(len(q), device=q.device) - cu_rows.long()[row]  # [T] within its row
    lengths = start.long() + counts  # [R] positions that the row's last token sees
    k = _gather_pages(k_cache, block_tables, lengths)  # [R, Hkv, L, D]
    v = _gather_pages(v_cache, block_tables, lengths)
    num_rows, num_kv_heads, span, head_dim = k.shape
    group = q.shape[1] // num_kv_heads

    padded = q.new_zeros((num_rows, int(counts.max()), *q.shape[1:]), dtype=torch.float32)
    padded[row, index] = q.float()
    grouped = padded.reshape(num_rows, -1, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("rhgqd,rhld->rhgql", grouped, k) * scale  # [R, Hkv, G, Q, L]
    seen = start.long()[:, None] + torch.arange(padded.shape[1], device=q.device)  # [R, Q]
    hidden = torch.arange(span, device=q.device) > seen[..., None]  # [R, Q, L]
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    out = torch.einsum("rhgql,rhld->rqhgd", scores.softmax(dim=-1), v)
    return out.flatten(2, 3)[row, index].to(q.dtype)


def _gather_pages(cache: Tensor, block_tables: Tensor, lengths: Tensor) -> Tensor:
    """Pages of every row side by side, f32[R, Hkv, L, D]; positions past its length are 0."""
    span = int(lengths.max())
    block_size = cache.shape[2]
    pages = block_tables[:, : -(-span // block_size)].long()  # [R, P]
    gathered = cache[pages].transpose(1, 2).flatten(2, 3)[:, :, :span].float()
    unused = torch.arange(span, device=cache.device) >= lengths[:, None]  # [R, L]
    return gathered.masked_fill(unused[:, None, :, None], 0.0)
