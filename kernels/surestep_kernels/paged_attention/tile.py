"""The parts of paged attention in Triton: a tile of queries, its online softmax, and merging.

Everything that decides the bits of a result is here; paged_attention.py describes the whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Shape(NamedTuple):
    """The constants that a kernel is compiled for."""

    KV_HEADS: int
    GROUP: int  # query heads for each KV head
    D: int  # of a head
    BLOCK_D: int  # D, or the next power of two
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # positions of a step
    BLOCK_SIZE: int  # positions of a page
    PAGES: int  # upper bound of the pages that the positions of a step touch
    SPLIT: int
    WINDOW: int
    SOFTCAP: float  # 0 = none
    HAS_SCALES: bool
    HAS_SINKS: bool
    HAS_WIDER: bool  # rows whose windows are wider
    PRECISION: str  # of products
    WIDEN: bool  # for Triton's interpreter, which cannot multiply bfloat16


class Pages(NamedTuple):
    """The pages that hold the positions of one row, for one KV head."""

    k: Any  # pointer to the head in page 0
    v: Any
    table: Any  # i32[B] of the row's slot
    num_blocks: Any


class VisibleRange(NamedTuple):
    """The positions that the queries of a tile see."""

    begin: Any  # first that any of them sees
    end: Any  # one past the last that any of them sees
    common: Any  # one past the last that all of them see, if there is no window


class Queries(NamedTuple):
    """The M queries of a tile, GROUP for each token, padded with copies of the row's last token.

    What is needed to store the result is held as single numbers here: one register of every thread
    each, where a number per query would be held through all products.
    """

    q: Any  # [M, BLOCK_D]
    position: Any  # i32[M] of the token: the last position that the query sees
    wider: Any  # positions that the window of the row has more
    own: Any  # queries that have a token
    token: Any  # of the batch, the first one's


@triton.jit
def visible_range(first, tokens, wider, limit, C: tl.constexpr):
    """Return the positions seen by a tile of `tokens` tokens that begins at position `first`."""
    begin = tl.maximum(first + 1 - C.WINDOW - wider, 0) if C.WINDOW else 0
    return VisibleRange(begin, tl.minimum(first + tokens, limit), tl.minimum(first + 1, limit))


@triton.jit
def load_queries(q_ptr, q_stride, row, index, kv_head, C: tl.constexpr):
    """Load the queries of the tile whose first token is the row's token `index`."""
    member, dims = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_D)
    token = index + member // C.GROUP
    token = tl.minimum(token, row.count - 1)
    head = kv_head * C.GROUP + member % C.GROUP
    flat = (row.begin + token).to(tl.int64)
    at = flat[:, None] * q_stride + head[:, None] * C.D + dims[None, :]
    q = tl.load(q_ptr + at, mask=(dims < C.D)[None, :], other=0.0)
    own = tl.minimum(row.count - index, C.BLOCK_M // C.GROUP) * C.GROUP
    return Queries(q, row.start + token, row.wider, own, (row.begin + index).to(tl.int64))


@triton.jit
def multiply(a, b, acc, C: tl.constexpr):
    if C.WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=C.PRECISION)


@triton.jit
def _cap_scores(scores, scale, C: tl.constexpr):
    """Return the scaled scores within -SOFTCAP..SOFTCAP by tanh; like `scale`, times log2(e)."""
    most = C.SOFTCAP * LOG2_E
    x = scores * (scale / most)
    small = tl.exp(-2.0 * tl.abs(x))  # at most 1
    size = most * ((1.0 - small) / (1.0 + small))
    return tl.where(x < 0, -size, size)


@triton.jit
def _mask_scores(scores, v, position, last, wider, C: tl.constexpr):
    """Set scores to -inf where a query does not see; non-finite values reach only those that do."""
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    broken = tl.max((~finite).to(tl.int32), axis=1)
    scores = tl.where(broken[None, :] > 0, float("nan"), scores)
    seen = position[None, :] <= last[:, None]
    if C.WINDOW:
        seen = seen & (position[None, :] > last[:, None] - C.WINDOW - wider)
    return tl.where(seen, scores, float("-inf")), tl.where(finite, v, 0.0)


@triton.jit
def empty_state(M: tl.constexpr, C: tl.constexpr):
    """Return the m, total and acc of no positions."""
    BLOCK_D: tl.constexpr = C.BLOCK_D  # Triton 3.6 does not accept a field in a shape
    m = tl.full((M,), float("-inf"), tl.float32)
    return m, tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK_D), tl.float32)


@triton.jit
def _find_pages(pages, seen, base, C: tl.constexpr):
    """Return the pages i32[N] of the positions from `base` on, -1 for positions past the end.

    Each id is read once, by all threads, as a number that no stage of the pipeline waits for.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N  # see empty_state()
    PAGES: tl.constexpr = C.PAGES
    first, step = base // C.BLOCK_SIZE, base % C.BLOCK_SIZE + tl.arange(0, BLOCK_N)
    page = tl.full((BLOCK_N,), -1, tl.int32)
    for i in tl.static_range(PAGES):
        is_seen = (first + i) * C.BLOCK_SIZE < seen.end
        block = tl.load(pages.table + first + i, mask=is_seen, other=-1)
        page = tl.where(step // C.BLOCK_SIZE == i, block, page)
    return page


@triton.jit
def _attend_blocks(
    m,  # f32[M] greatest score so far, times log2(e)
    total,  # f32[M] sum of the weights 2^(score - m)
    acc,  # f32[M, BLOCK_D] sum of the weighted values
    queries,
    pages,
    seen,
    scale,
    begin,
    end,
    C: tl.constexpr,
    MASKED: tl.constexpr,  # whether some query does not see some position
):
    """Run the online softmax over the blocks of positions begin..end."""
    BLOCK_M: tl.constexpr = C.BLOCK_M  # see empty_state()
    BLOCK_N: tl.constexpr = C.BLOCK_N
    q, dims = queries.q, tl.arange(0, C.BLOCK_D)
    for base in range(begin, end, C.BLOCK_N):
        position = base + tl.arange(0, C.BLOCK_N)
        used = (position >= seen.begin) & (position < seen.end)
        page = _find_pages(pages, seen, base, C)
        used = used & (page >= 0) & (page < pages.num_blocks)
        line = page.to(tl.int64) * (C.KV_HEADS * C.BLOCK_SIZE) + position % C.BLOCK_SIZE
        at, mask = line[:, None] * C.D + dims[None, :], used[:, None] & (dims < C.D)[None, :]
        k = tl.load(pages.k + at, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(pages.v + at, mask=mask, other=0.0).to(q.dtype)
        scores = multiply(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), C)
        if C.SOFTCAP > 0:
            scores = _cap_scores(scores, scale, C)
        factor = 1.0 if C.SOFTCAP > 0 else scale
        if MASKED:
            last, wider = queries.position, queries.wider
            scores, v = _mask_scores(scores, v, position, last, wider, C)
        top = tl.maximum(m, tl.max(scores, axis=1) * factor)
        origin = tl.where(top == float("-inf"), 0.0, top)
        weights, decay = tl.exp2(scores * factor - origin[:, None]), tl.exp2(m - origin)
        total = total * decay + tl.sum(weights, axis=1)
        acc = multiply(weights.to(v.dtype), v, acc * decay[:, None], C)
        m = top
    return m, total, acc


@triton.jit
def attend_split(queries, pages, seen, scale, split, C: tl.constexpr):
    """Return the m, total and acc of one split."""
    begin = tl.maximum(split * C.SPLIT, seen.begin // C.BLOCK_N * C.BLOCK_N)
    end = tl.minimum(split * C.SPLIT + C.SPLIT, seen.end)
    m, total, acc = empty_state(C.BLOCK_M, C)
    middle = begin
    if not C.WINDOW:
        middle = tl.maximum(tl.minimum(end, seen.common) // C.BLOCK_N * C.BLOCK_N, begin)
        m, total, acc = _attend_blocks(
            m, total, acc, queries, pages, seen, scale, begin, middle, C, False
        )
    return _attend_blocks(m, total, acc, queries, pages, seen, scale, middle, end, C, True)


@triton.jit
def merge(m, total, acc, next_m, next_total, next_acc):
    """Merge the states of two ranges of positions; an empty one changes nothing."""
    top = tl.maximum(m, next_m)
    origin = tl.where(top == float("-inf"), 0.0, top)
    decay, next_decay = tl.exp2(m - origin), tl.exp2(next_m - origin)
    acc = acc * decay[:, None] + next_acc * next_decay[:, None]
    return top, total * decay + next_total * next_decay, acc


@triton.jit
def finish(m, total, acc, head, sinks_ptr, scales_ptr, C: tl.constexpr):
    """Return the weighted mean of the values, with the heads' sinks in the denominator."""
    if C.HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        top = tl.maximum(m, sink)
        decay = tl.exp2(m - top)
        total = total * decay + tl.exp2(sink - top)
        acc = acc * decay[:, None]
    if C.HAS_SCALES:
        acc = acc * tl.load(scales_ptr + 1)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
