"""Causal attention of a ragged batch over the paged KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_kernels.store_kv import INT8, LayerCache, decode_int8

_UNLIMITED = 1 << 40  # positions


class AttentionRows(NamedTuple):
    """R rows of T tokens. Row r owns tokens cu_rows[r]:cu_rows[r+1]."""

    block_tables: Tensor  # i32[S, B] pages of each slot in order of position
    slots: Tensor  # i64[R] existing slots, to whose pages each row attends
    cu_rows: Tensor  # i32[R+1] first token of each row, then the first of no row
    start: Tensor  # i32[R] committed length: position of the row's first token
    max_tokens: int  # upper bound of the tokens of a row, known on the host; it sizes launches
    wider: Tensor | None = None  # i32[R] positions that each row's window has more; None: none


class PagedAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        cache: LayerCache,
        rows: AttentionRows,
        scale: float,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
    ) -> Tensor: ...


def paged_attention_reference(
    q: Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend q [T, Hq, D] to the cached keys and values; return [T, Hq, D].

    The i-th token of row r sees the KV positions 0..start[r]+i; with a `window` it sees only the
    last `window` of them, itself included, or wider[r] more. A head's sink f32[Hq] is one more
    logit in the denominator of its softmax. With a `softcap` the score s counts as
    softcap * tanh(s / softcap). Positions that no token of the row sees never influence the result,
    whatever they hold. The result of tokens that belong to no row is undefined.
    """
    block_tables, slots, cu_rows, start = rows[:4]
    counts = (cu_rows[1:] - cu_rows[:-1]).long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)  # of tokens
    out = torch.zeros_like(q)
    if not len(row):
        return out
    index = torch.arange(len(row), device=q.device) - cu_rows.long()[row]  # within its row
    reach = torch.full_like(start, window or _UNLIMITED, dtype=torch.int64)
    seen = _Visible(start.long(), counts, reach if rows.wider is None else reach + rows.wider)
    k = _gather_pages(cache, 0, block_tables, slots, seen)  # [R, Hkv, L, D]
    v = _gather_pages(cache, 1, block_tables, slots, seen)
    num_rows, num_kv_heads, span, head_dim = k.shape
    group = q.shape[1] // num_kv_heads

    padded = q.new_zeros((num_rows, int(counts.max()), *q.shape[1:]), dtype=torch.float32)
    padded[row, index] = q[: len(row)].float()
    grouped = padded.reshape(num_rows, -1, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.einsum("rhgqd,rhld->rhgql", grouped, k) * scale  # [R, Hkv, G, Q, L]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~seen.by_token(padded.shape[1], span)
    weights = _softmax(scores.masked_fill(hidden[:, None, None], float("-inf")), sinks)
    attended = torch.einsum("rhgql,rhld->rqhgd", weights, v)
    out[: len(row)] = attended.flatten(2, 3)[row, index].to(q.dtype)
    return out


class _Visible(NamedTuple):
    """The positions that the tokens of each row see."""

    start: Tensor  # i64[R] position of the row's first token
    counts: Tensor  # i64[R] its tokens
    reach: Tensor  # i64[R] positions that a token sees at most, its own included

    def by_token(self, tokens: int, span: int) -> Tensor:
        """Return bool[R, tokens, span]."""
        device = self.start.device
        own = self.start[:, None, None] + torch.arange(tokens, device=device)[:, None]
        position = torch.arange(span, device=device)
        return (position <= own) & (position > own - self.reach[:, None, None])

    def by_row(self, span: int) -> Tensor:
        """Return bool[R, span]: what any token of the row sees."""
        position = torch.arange(span, device=self.start.device)
        first = self.start[:, None] + 1 - self.reach[:, None]
        behind = position >= (self.start + self.counts)[:, None]
        return ~behind & (position >= first)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Apply softmax over the last dimension of [R, Hkv, G, Q, L]."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.float().view(scores.shape[1], scores.shape[2], 1, 1)
    sink = sink.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]


def _gather_pages(
    cache: LayerCache, which: int, block_tables: Tensor, slots: Tensor, seen: _Visible
) -> Tensor:
    """Return keys (0) or values (1) of every row in order, f32[R, Hkv, L, D]; unseen ones are 0."""
    pages = cache.pages[which]
    span = int((seen.start + seen.counts).max())
    used = block_tables[slots, : -(-span // pages.shape[2])].long()  # [R, P]
    gathered = pages[used].transpose(1, 2).flatten(2, 3)[:, :, :span]
    gathered = decode_int8(gathered) if pages.dtype is INT8 else gathered.float()
    if cache.scales is not None:
        gathered = gathered * cache.scales[which]
    return gathered.masked_fill(~seen.by_row(span)[:, None, :, None], 0.0)
