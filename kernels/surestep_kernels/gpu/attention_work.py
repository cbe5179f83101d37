"""What a program of paged attention does: rows have units of work, which are counted on the device.

Rows of one tile's tokens at most, as decode rows and windows are, have a unit for each split that
they see; longer rows, as prompts are, one for each of their tiles. Units are numbered from row to
row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .attention_tile import see

_ROWS = tl.constexpr(256)  # looked at together


class Rows(NamedTuple):
    """All rows of a batch."""

    cu: Any  # i32[R+1]
    start: Any  # i32[R]
    count: Any  # R
    limit: Any  # positions that a slot has room for
    lines: Any  # of scratch


class Row(NamedTuple):
    """One of them."""

    begin: Any  # its first token
    start: Any  # the position of that
    count: Any  # tokens


class Place(NamedTuple):
    """Where a unit of work is."""

    row: Any
    unit: Any  # of the row
    line: Any  # of scratch, the row's first


@triton.jit
def load_row(rows, row):
    """A row of the batch."""
    begin, start = tl.load(rows.cu + row), tl.load(rows.start + row)
    return Row(begin, start, tl.load(rows.cu + row + 1) - begin)


@triton.jit
def _tokens_and_units(rows, row, end, C: tl.constexpr, LONG: tl.constexpr):
    """Of rows; those from `end` on have none."""
    TOKENS: tl.constexpr = C.BLOCK_M // C.GROUP
    used = row < end
    start = tl.load(rows.start + row, mask=used, other=0)
    begin = tl.load(rows.cu + row, mask=used, other=0)
    count = tl.load(rows.cu + row + 1, mask=used, other=0) - begin
    if LONG:
        units = tl.where(count > TOKENS, tl.cdiv(count, TOKENS), 0)
    else:
        units = tl.where((count > 0) & (count <= TOKENS), splits_of(rows, start, count, C)[1], 0)
    return count, tl.where(used, units, 0)


@triton.jit
def splits_of(rows, start, count, C: tl.constexpr):
    """The first split that a row of `count` tokens sees, and how many."""
    seen = see(start, count, rows.limit, C)
    first = seen.begin // C.SPLIT
    return first, tl.maximum(tl.cdiv(seen.end, C.SPLIT) - first, 0)


@triton.jit
def count_units(rows, C: tl.constexpr, LONG: tl.constexpr):
    """Of all rows that are, or are not, long."""
    units = 0
    for base in range(0, rows.count, _ROWS):
        row = base + tl.arange(0, _ROWS)
        units += tl.sum(_tokens_and_units(rows, row, rows.count, C, LONG)[1])
    return units


@triton.jit
def find_unit(rows, at, C: tl.constexpr, LONG: tl.constexpr):
    """The place of unit `at`, which must exist."""
    found, units, lines, counted = 0, 0, 0, 0
    for base in range(0, rows.count, _ROWS):
        row = base + tl.arange(0, _ROWS)
        count, own = _tokens_and_units(rows, row, rows.count, C, LONG)
        is_before = counted + tl.cumsum(own) <= at
        found += tl.sum(is_before.to(tl.int32))
        units += tl.sum(tl.where(is_before, own, 0))
        lines += tl.sum(tl.where(is_before, own * count, 0))
        counted += tl.sum(own)
    return Place(found, at - units, lines)


@triton.jit
def first_line(rows, end, C: tl.constexpr):
    """Of row `end`: lines of scratch that the rows before it have."""
    lines = 0
    for base in range(0, end, _ROWS):
        row = base + tl.arange(0, _ROWS)
        count, units = _tokens_and_units(rows, row, end, C, False)
        lines += tl.sum(count * units)
    return lines
