"""Divide the work of paged attention among programs, without influence on results.

The host knows the sizes of a batch, but not how long its rows are. So launches are sized by these
numbers, within bounds that do not grow with the longest context a slot has room for; the device
finds out which program does what (work.py).
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT = 256  # KV positions
PROGRAMS = 4 * 132  # four for each multiprocessor of an H100, whatever the batch
MAX_SCRATCH = 256 << 20  # bytes of the splits' states


class Batch(NamedTuple):
    """The sizes of a batch that the host knows."""

    tokens: int
    rows: int
    max_tokens: int  # upper bound of a row's tokens
    positions: int  # capacity of a slot
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    tile: int = 64  # queries that share their loads


class Grid(NamedTuple):
    """Shares and lines are of rows that fit into one tile, tiles of longer rows."""

    shares: int  # per KV head, among which all splits are divided
    tiles: int  # per KV head: programs without a share, at most one per tile
    has_long: bool  # whether some rows may be longer, or lines too few
    lines: int  # of scratch: a token's sums over a split, of all heads
    merges: int  # tokens whose splits are merged, at most

    def programs_of(self, batch: Batch) -> tuple[tuple[int], tuple[int, int]]:
        """Return the grids of the programs that attend, and of those that merge."""
        return ((self.shares + self.tiles) * batch.kv_heads,), (self.merges, batch.heads)


def grid_of(batch: Batch) -> Grid:
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
