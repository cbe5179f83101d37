"""The mass of tokens that no list has, estimated in f32 to within a bound.

top_p measures by whole numbers, and to add up those of a vocabulary takes longer than to read it.
All that they decide is where the nucleus ends, which few numbers near the right one change: so what
is not listed is estimated, and where the least and the greatest mass that it may have disagree
about the end, it is added up after all.

By how much an estimate may be off, for gaps up to 29: what is farther has one unit at most, and the
others lose one in being cut. Relatively, 29 * 2**-22 by the rounding of exponents here, 29 * 2**-23
by that of gaps there, 4 * 2**-22 by exp2.approx, thrice at most, and by the polynomial, and
40 * 2**-24 by sums, in which no number is in more than 40 additions: together below 2**-16. SLACK
is twice that, which covers the 32 turns that a vocabulary of 2**22 tokens takes instead of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surestep_kernels.step.mass import ALL, LOG2_E, UNIT_BITS

from .vocab import is_finite

SLACK = 2.0**-15
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_UNIT: tl.constexpr = tl.constexpr(float(1 << UNIT_BITS))
_ALL: tl.constexpr = tl.constexpr(float(ALL))
_LESS: tl.constexpr = tl.constexpr(1.0 - SLACK)
_MORE: tl.constexpr = tl.constexpr(1.0 + SLACK)
_HOTTEST: tl.constexpr = tl.constexpr(2.0**64)


@triton.jit
def weighs_all(top_k_ptr, top_p_ptr, window, V):
    """Whether top_p measures by all tokens, and not by the k that top_k leaves."""
    return (tl.load(top_p_ptr + window) < float("inf")) & (tl.load(top_k_ptr + window) >= V)


@triton.jit
def weight_scale(temperature):
    """By which differences of logits become exponents of 2; NaN, as estimates are then, where it
    would be too small to be exact."""
    return tl.where(temperature < _HOTTEST, _LOG2_E / temperature, float("nan"))


@triton.jit
def weigh(weight, best, greatest, z, scale):
    """Weights f32[G] of groups relative to `greatest`, from those relative to `best` and from more
    of their logits f32[G, B]."""
    base = tl.where(is_finite(greatest), greatest, 0.0)  # -inf - -inf is no number
    before = weight * tl.exp2((best - base) * scale)
    return before + tl.sum(tl.exp2((z - base[:, None]) * scale), axis=1)


@triton.jit
def weight_of(bits):
    """The weight f32 of tokens with gaps of these bits, relative to the best one's."""
    return tl.exp2(bits.to(tl.float32, bitcast=True) * -_LOG2_E)


@triton.jit
def bounds(weight, V):
    """The least and the greatest mass i64 that V tokens or less of this weight have."""
    known = weight == weight
    units = tl.where(known, weight, 0.0).to(tl.float64) * _UNIT
    slack = tl.where(weight > 0, V, 0).to(tl.float64)
    least = tl.maximum(units * _LESS - slack, 0.0).to(tl.int64)
    most = tl.where(known, units * _MORE + slack + 1.0, _ALL)
    most = tl.where(weight == 0.0, 0.0, tl.minimum(most, _ALL))
    return least, most.to(tl.int64)
