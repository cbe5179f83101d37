"""The work of programs that share out the positions of tokens: units, counted on the device.

A row has as many units for each of its tokens as its last token has splits of positions. Units are
numbered from row to row, and in a row from token to token. Rows of more than MOST tokens have none,
nor have those none of whose tokens sees more than LEAST positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

_ROWS = tl.constexpr(256)  # processed together


class Rows(NamedTuple):
    """All rows of a batch."""

    cu: Any  # i32[R+1]
    start: Any  # i32[R]
    count: Any  # R
    first: Any  # tokens that there is work for: from here
    end: Any  # to here
    width: Any  # of the block table
    limit: Any  # positions of a token that there is work for, at most
    lines: Any  # units that there is room for: rows behind them have none


@triton.jit
def seen_by(token, cu_rows_ptr, start_ptr, num_rows):
    """Return a token's row, and how many positions it may see: none if it is of no row."""
    row = 0
    for base in range(0, num_rows, _ROWS):
        number = base + tl.arange(0, _ROWS)
        end = tl.load(cu_rows_ptr + 1 + number, mask=number < num_rows, other=2147483647)
        row += tl.sum((end <= token).to(tl.int32), axis=0)
    is_used = row < num_rows
    begin = tl.load(cu_rows_ptr + row, mask=is_used, other=0)
    start = tl.load(start_ptr + row, mask=is_used, other=0)
    return row, tl.where(is_used, start + token - begin + 1, 0)


@triton.jit
def measure(rows, row, used, SPLIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return the first token of rows, their tokens, and the splits of each."""
    begin = tl.load(rows.cu + row, mask=used, other=0)
    end = tl.load(rows.cu + row + 1, mask=used, other=0)
    before = tl.load(rows.start + row, mask=used, other=0) - begin
    first, end = tl.maximum(begin, rows.first), tl.minimum(end, rows.end)
    count, seen = tl.maximum(end - first, 0), before + end
    has_units = (count > 0) & (count <= MOST) & (seen > LEAST)
    return first, count, tl.where(has_units, tl.cdiv(tl.minimum(seen, rows.limit), SPLIT), 0)


@triton.jit
def count_units(rows, SPLIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Count the units that there is room for."""
    counted, units = 0, 0
    for base in range(0, rows.count, _ROWS):
        row = base + tl.arange(0, _ROWS)
        _, count, splits = measure(rows, row, row < rows.count, SPLIT, LEAST, MOST)
        has_room = units + tl.cumsum(count * splits) <= rows.lines
        counted += tl.sum(tl.where(has_room, count * splits, 0))
        units += tl.sum(count * splits)
    return counted


@triton.jit
def find_unit(rows, at, SPLIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return row, token and split of unit `at`, which must exist, and the splits of the token."""
    row, before, units = 0, 0, 0
    for base in range(0, rows.count, _ROWS):
        number = base + tl.arange(0, _ROWS)
        _, count, splits = measure(rows, number, number < rows.count, SPLIT, LEAST, MOST)
        is_before = units + tl.cumsum(count * splits) <= at
        row += tl.sum(is_before.to(tl.int32))
        before += tl.sum(tl.where(is_before, count * splits, 0))
        units += tl.sum(count * splits)
    first, _, splits = measure(rows, row, True, SPLIT, LEAST, MOST)
    return row, first + (at - before) // splits, (at - before) % splits, splits


@triton.jit
def first_unit(rows, end, SPLIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return the number of units of all rows before row `end`, with room or without."""
    units = 0
    for base in range(0, end, _ROWS):
        row = base + tl.arange(0, _ROWS)
        _, count, splits = measure(rows, row, row < end, SPLIT, LEAST, MOST)
        units += tl.sum(count * splits)
    return units


@triton.jit
def find_token(rows, token, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Return the row of a token, and whether it is of a row that has no units."""
    row, seen = seen_by(token, rows.cu, rows.start, rows.count)
    used = row < rows.count
    _, count, splits = measure(rows, row, used, SPLIT, 0, MOST)
    behind = first_unit(rows, row, SPLIT, 0, MOST) + count * splits
    return row, (seen > 0) & ((splits == 0) | (behind > rows.lines))
