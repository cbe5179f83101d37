"""How paged attention is shared out among programs: of no influence on its results.

Of a batch the host knows sizes, but not how long its rows are. So what a launch takes follows from
these sizes, within bounds that the longest context that a slot has room for does not move; who does
what is found on the device (attention_work.py).
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT = 256  # KV positions
PROGRAMS = 4 * 132  # four for each multiprocessor of an H100, whatever the batch
MAX_SCRATCH = 256 << 20  # bytes for what splits add up to


class Batch(NamedTuple):
    """What the host knows."""

    tokens: int
    rows: int
    max_tokens: int  # of a row, or more
    positions: int  # that a slot has room for
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    tile: int = 64  # queries that share their loads


class Grid(NamedTuple):
    """Shares and lines are of rows that one tile holds, tiles of longer ones."""

    shares: int  # for each KV head, into which all splits are shared out
    tiles: int  # for each KV head: programs without a share, as many as tiles at most
    has_long: bool  # whether some rows may be longer, or lines too few
    lines: int  # of scratch: a token's sums over a split, of all heads
    merges: int  # tokens at most

    def programs_of(self, batch: Batch) -> tuple[int, int]:
        """Of the launch that attends, and of the one that merges."""
        return (self.shares + self.tiles) * batch.kv_heads, self.merges * batch.heads


def grid_of(batch: Batch) -> Grid:
    """See above."""
    tile_tokens = batch.tile // (batch.heads // batch.kv_heads)
    tokens, rows, positions = batch.tokens, batch.rows, batch.positions
    if batch.window:
        positions = min(positions, batch.window + tile_tokens - 1 + SPLIT)
    splits = -(-positions // SPLIT)
    tiles = 0
    if batch.max_tokens > tile_tokens:
        tiles = tokens // tile_tokens + min(rows, tokens // (tile_tokens + 1))
    wanted = min(tokens, rows * tile_tokens) * splits
    lines = min(wanted, MAX_SCRATCH // (4 * batch.heads * (batch.head_dim + 2)))
    return Grid(
        shares=min(-(-PROGRAMS // batch.kv_heads), rows * splits),
        tiles=tiles,
        has_long=tiles > 0 or lines < wanted,
        lines=lines,
        merges=rows * min(batch.max_tokens, tile_tokens),
    )
