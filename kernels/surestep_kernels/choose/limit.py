"""The last token that top_k and top_p keep: among listed candidates, or in a whole row.

Each rule keeps a token by what is in front of it, fewer than k tokens or less than the target mass,
so every token up to some key is kept. The key's bits are found from the highest to the lowest, two
at a time, with a sum over all tokens for each of three guesses: over the registers that hold a
list, or over a row in memory.

A `row` is what a row in memory needs: (row_ptr, V, peak, temperature, id_bits).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_mass import mass_of, target_mass
from .vocab import gap_bits, key_of

_NEVER: tl.constexpr = tl.constexpr(9223372036854775807)


@triton.jit
def _in_front(
    keys,
    measures,
    row,
    a,
    b,
    c,
    LISTED: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the sum of measures i64 (1 or the mass) of the tokens before each of three keys."""
    row_ptr, V, peak, temperature, id_bits = row
    if LISTED and not WEIGHED:  # lists are short: three counts are added up as one number
        one = (keys < a).to(tl.int64) + ((keys < b).to(tl.int64) << 20)
        counts = tl.sum(one + ((keys < c).to(tl.int64) << 40), axis=0)
        return counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
    if LISTED:
        before_a = tl.where(keys < a, measures, 0)
        before_b = tl.where(keys < b, measures, 0)
        before_c = tl.where(keys < c, measures, 0)
    else:
        before_a = tl.zeros((BLOCK,), tl.int64)
        before_b = tl.zeros((BLOCK,), tl.int64)
        before_c = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, V, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            z = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
            bits = gap_bits(z, peak, temperature)
            key = tl.where(ids < V, key_of(bits, ids, id_bits), _NEVER)
            measure = mass_of(bits) if WEIGHED else tl.full((BLOCK,), 1, tl.int64)
            before_a += tl.where(key < a, measure, 0)
            before_b += tl.where(key < b, measure, 0)
            before_c += tl.where(key < c, measure, 0)
    return tl.sum(before_a, axis=0), tl.sum(before_b, axis=0), tl.sum(before_c, axis=0)


@triton.jit
def _last_before(
    keys,
    measures,
    row,
    target,
    bound,
    LISTED: tl.constexpr,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the greatest key up to `bound` with less than `target` in front of it."""
    id_bits = row[4]
    found = bound * 0
    steps = (32 + id_bits) // 2
    for i in range(steps):
        unit = (found * 0 + 1) << (2 * (steps - 1 - i))
        a = tl.minimum(found + unit, bound)
        b = tl.minimum(found + 2 * unit, bound)
        c = tl.minimum(found + 3 * unit, bound)
        before_a, before_b, before_c = _in_front(
            keys, measures, row, a, b, c, LISTED, WEIGHED, BLOCK
        )
        found = tl.where(before_a < target, a, found)
        found = tl.where(before_b < target, b, found)
        found = tl.where(before_c < target, c, found)
    return found


@triton.jit
def listed_limit(keys, masses, row, bound, top_k, top_p, least, most, BLOCK: tl.constexpr):
    """Return the key of the last listed token up to `bound` that top_k and top_p keep.

    Where top_k is off, the total mass for top_p lies between `least` and `most`: if they disagree
    about the limit, the exact mass is summed, which reads the whole row.
    """
    V = row[1]
    limit = bound
    if top_k < V:
        limit = _last_before(keys, masses, row, top_k.to(tl.int64), limit, True, False, BLOCK)
        least = tl.sum(tl.where(keys <= limit, masses, 0), axis=0)
        most = least
    if top_p < float("inf"):
        reach, unsure = limit, True
        while unsure:
            limit = _last_before(
                keys, masses, row, target_mass(top_p, least), reach, True, True, BLOCK
            )
            through = tl.sum(tl.where(keys <= limit, masses, 0), axis=0)
            unsure = (least < most) & (through < target_mass(top_p, most))
            if unsure:
                least, _, _ = _in_front(
                    keys, masses, row, reach + 1, reach, reach, False, True, BLOCK
                )
                most = least
    return limit


@triton.jit
def whole_limit(row, bound, top_k, top_p, BLOCK: tl.constexpr):
    """Return the key of the last token up to `bound` that top_k and top_p keep in a whole row."""
    V = row[1]
    limit = bound
    if top_k < V:
        limit = _last_before(bound, bound, row, top_k.to(tl.int64), limit, False, False, BLOCK)
    if top_p < float("inf"):
        total, _, _ = _in_front(bound, bound, row, limit + 1, limit, limit, False, True, BLOCK)
        limit = _last_before(
            bound, bound, row, target_mass(top_p, total), limit, False, True, BLOCK
        )
    return limit
