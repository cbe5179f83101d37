"""Division of a row of logits among programs, and the order of its tokens."""

from __future__ import annotations

import triton
import triton.language as tl

LANES = 64  # consecutive tokens that a program reads together
LINES = 32  # lines that it reads at once
MAX_PARTS = 64  # programs that share a row
RUN = 8  # consecutive tokens in a group: a sector of memory
RUNS = 4  # of them that a group has at once
GROUPS = LANES * LINES // (RUN * RUNS)  # of a part
_LANES: tl.constexpr = tl.constexpr(LANES)
_LINES: tl.constexpr = tl.constexpr(LINES)
_RUN: tl.constexpr = tl.constexpr(RUN)
_RUNS: tl.constexpr = tl.constexpr(RUNS)
_GROUPS: tl.constexpr = tl.constexpr(GROUPS)
_ABREAST: tl.constexpr = tl.constexpr(LANES // RUN)
_NO_ID: tl.constexpr = tl.constexpr(2147483647)


def parts_of(vocab: int) -> int:
    """Return how many programs share a row. Lane l of part p has the tokens p * LANES + l and so on
    in steps of parts * LANES, so that neighbouring tokens, among which the common ones are, are
    spread."""
    return min(-(-vocab // LANES), MAX_PARTS)


def id_bits_of(vocab: int) -> int:
    """Return how many bits ids take in a key."""
    return max(1, (vocab - 1).bit_length())


@triton.jit
def ids_of(first, part, parts):
    """Return the token ids i32[LINES * LANES] of a part from `first` on."""
    place = tl.arange(0, _LINES * _LANES)
    return first + part * _LANES + place % _LANES + (place // _LANES) * (parts * _LANES)


@triton.jit
def ids_of_group(first, group, place, parts):
    """Return the token ids of groups from `first` on at places below RUN * RUNS, of which one warp
    of a program for their part has all: its runs lie `parts * LANES` apart."""
    part, at = group // _GROUPS, group % _GROUPS
    column = part * _LANES + at % _ABREAST * _RUN + place % _RUN
    line = at // _ABREAST * _RUNS + place // _RUN
    return first + column + line * (parts * _LANES)


@triton.jit
def is_finite(x):
    """Return whether a row has a finite greatest logit."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def gap_bits(z, peak, temperature):
    """Return the gaps to the peak, which is not -0, as bits: not negative, and ordered like the
    gaps."""
    gap = tl.div_rn(peak - z, tl.zeros_like(z) + temperature)
    return gap.to(tl.int32, bitcast=True)


@triton.jit
def key_of(bits, ids, id_bits):
    """Encode the order of tokens in one i64: the smallest gap first, then the lowest id."""
    return (bits.to(tl.int64) << id_bits) | ids.to(tl.int64)


@triton.jit
def best_of(values, ids):
    """Return the greatest value, NaN if there is any, and its lowest id."""
    top = tl.max(tl.where(values == values, values, float("-inf")))
    best_id = tl.min(tl.where(values == top, ids, _NO_ID))
    nan = tl.max((values != values).to(tl.int32)) > 0
    return tl.where(nan, float("nan"), top), best_id


@triton.jit
def better(best, best_id, value, ids):
    """Return element by element the greater value; NaN is kept, and the lower id among equals."""
    wins = ((value > best) | (value != value)) & (best == best)
    return tl.where(wins, value, best), tl.where(wins, ids, best_id)


@triton.jit
def best_of_parts(value_ptr, id_ptr, row, parts, BLOCK: tl.constexpr):
    """Return the best value of a row, NaN if there is any, and its id."""
    part = tl.arange(0, BLOCK)
    at, mask = row * parts + part, part < parts
    value = tl.load(value_ptr + at, mask=mask, other=float("-inf"))
    return best_of(value, tl.load(id_ptr + at, mask=mask, other=_NO_ID))


@triton.jit
def append(rows_ptr, count_ptr, row):
    """Append to a list of rows in any order."""
    at = tl.atomic_add(count_ptr, 1, sem="relaxed")
    tl.store(rows_ptr + at, row.to(tl.int32))
