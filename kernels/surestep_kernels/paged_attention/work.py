"""The work of each program of paged attention: rows consist of units, counted on the device.

A row that fits into one tile, such as a decode row or a window, has one unit for each split that it
sees, and lines of scratch for them. Long rows, such as prompts, have a unit for each tile; so has a
row for which no lines are left. Units of one kind are numbered from row to row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import Pages, load_queries, visible_range

_ROWS = tl.constexpr(256)  # processed together


class Rows(NamedTuple):
    """All rows of a batch."""

    cu: Any  # i32[R+1]
    start: Any  # i32[R]
    wider: Any  # i32[R]; HAS_WIDER only
    count: Any  # R
    limit: Any  # positions: the capacity of a slot
    lines: Any  # of scratch


class Row(NamedTuple):
    """Row of the batch."""

    begin: Any  # its first token
    start: Any  # the position of that
    wider: Any  # positions that its window has more
    count: Any  # tokens


class Inputs(NamedTuple):
    """The inputs of a program, which has one KV head."""

    rows: Any
    pages: Any  # of all slots: the table is i32[S, B]
    slots: Any  # i64[R]
    q: Any
    q_stride: Any
    kv_head: Any


class Place(NamedTuple):
    """The position of a unit of work."""

    row: Any
    unit: Any  # of the row
    line: Any  # of scratch, the row's first


@triton.jit
def load_row(rows, row, used, C: tl.constexpr):
    """Load rows of the batch; those that are not `used` have no tokens."""
    begin = tl.load(rows.cu + row, mask=used, other=0)
    start = tl.load(rows.start + row, mask=used, other=0)
    wider = tl.load(rows.wider + row, mask=used, other=0) if C.HAS_WIDER else 0
    count = tl.load(rows.cu + row + 1, mask=used, other=0) - begin
    return Row(begin, start, wider, count)


@triton.jit
def splits_of(rows, row, C: tl.constexpr):
    """Return the first split that a row sees, and the number of splits."""
    seen = visible_range(row.start, row.count, row.wider, rows.limit, C)
    first = seen.begin // C.SPLIT
    return first, tl.maximum(tl.cdiv(seen.end, C.SPLIT) - first, 0)


@triton.jit
def _measure(rows, row, end, line, C: tl.constexpr, LONG: tl.constexpr):
    """Return the units of rows, and their lines from `line` on. Rows from `end` on have none."""
    TOKENS: tl.constexpr = C.BLOCK_M // C.GROUP
    of = load_row(rows, row, row < end, C)
    count = of.count
    is_long = count > TOKENS
    splits = tl.where(is_long | (count == 0), 0, splits_of(rows, of, C)[1])
    lines = splits * count
    is_apart = line + tl.cumsum(lines) <= rows.lines
    if LONG:
        units = tl.where(is_long, tl.cdiv(count, TOKENS), ((splits > 0) & ~is_apart).to(tl.int32))
    else:
        units = tl.where(is_apart, splits, 0)
    return units, lines


@triton.jit
def count_units(rows, C: tl.constexpr, LONG: tl.constexpr):
    """Count the units of one kind."""
    counted, line = 0, 0
    for base in range(0, rows.count, _ROWS):
        row = base + tl.arange(0, _ROWS)
        units, lines = _measure(rows, row, rows.count, line, C, LONG)
        counted += tl.sum(units)
        line += tl.sum(lines)
    return counted


@triton.jit
def find_unit(rows, at, C: tl.constexpr, LONG: tl.constexpr):
    """Return the place of unit `at`, which must exist."""
    found, before, first, counted, line = 0, 0, 0, 0, 0
    for base in range(0, rows.count, _ROWS):
        row = base + tl.arange(0, _ROWS)
        units, lines = _measure(rows, row, rows.count, line, C, LONG)
        is_before = counted + tl.cumsum(units) <= at
        found += tl.sum(is_before.to(tl.int32))
        before += tl.sum(tl.where(is_before, units, 0))
        first += tl.sum(tl.where(is_before, lines, 0))
        counted += tl.sum(units)
        line += tl.sum(lines)
    return Place(found, at - before, first)


@triton.jit
def first_line(rows, end, C: tl.constexpr):
    """Return the first scratch line of row `end`: the number of lines of all rows before it."""
    line = 0
    for base in range(0, end, _ROWS):
        row = base + tl.arange(0, _ROWS)
        line += tl.sum(_measure(rows, row, end, line, C, False)[1])
    return line


@triton.jit
def load_tile(inputs, number, index, C: tl.constexpr):
    """Return the queries of a row from its token `index` on, their pages and visible range."""
    row, of = load_row(inputs.rows, number, True, C), inputs.pages
    seen = visible_range(
        row.start + index,
        tl.minimum(C.BLOCK_M // C.GROUP, row.count - index),
        row.wider,
        inputs.rows.limit,
        C,
    )
    queries = load_queries(inputs.q, inputs.q_stride, row, index, inputs.kv_head, C)
    table = of.table + tl.load(inputs.slots + number) * (inputs.rows.limit // C.BLOCK_SIZE)
    return queries, Pages(of.k, of.v, table, of.num_blocks), seen
