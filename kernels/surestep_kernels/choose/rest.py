"""The mass of tokens that are not listed, estimated in f32 to within a bound.

top_p measures in whole numbers, and summing those of a vocabulary takes longer than reading it. All
that they decide is where the nucleus ends, which few numbers near the right one change: so unlisted
tokens are estimated, and if the least and the greatest mass that they may have disagree about the
end, they are summed after all.

The error of an estimate, for gaps up to 29: farther tokens have one unit at most, and the others
lose one by truncation. Relatively, 29 * 2**-22 by the rounding of exponents here, 29 * 2**-23 by
that of gaps there, 4 * 2**-22 by exp2.approx, three times at most, and by the polynomial, and 40 *
2**-24 by sums, in which no number takes part in more than 40 additions: together below 2**-16.
SLACK is twice that, which covers the 32 turns that a vocabulary of 2**22 tokens takes instead of
two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .mass import ALL, LOG2_E, UNIT_BITS
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
    """Return whether top_p measures by all tokens, and not by the k that top_k keeps."""
    return (tl.load(top_p_ptr + window) < float("inf")) & (tl.load(top_k_ptr + window) >= V)


@triton.jit
def weight_scale(temperature):
    """Return the factor that turns differences of logits into exponents of 2; NaN, as the estimates
    are then, if it is too small to be exact."""
    return tl.where(temperature < _HOTTEST, _LOG2_E / temperature, float("nan"))


@triton.jit
def weigh(weight, best, greatest, z, scale):
    """Return weights f32[G] of groups relative to `greatest`, from those relative to `best` plus
    more of their logits f32[G, B]."""
    base = tl.where(is_finite(greatest), greatest, 0.0)  # -inf - -inf is NaN
    before = weight * tl.exp2((best - base) * scale)
    return before + tl.sum(tl.exp2((z - base[:, None]) * scale), axis=1)


@triton.jit
def weight_of(bits):
    """Return the weight f32 of tokens with gaps of these bits, relative to the best one's."""
    return tl.exp2(bits.to(tl.float32, bitcast=True) * -_LOG2_E)


@triton.jit
def bounds(weight, V):
    """Return the least and the greatest mass i64 of up to V tokens of this total weight."""
    known = weight == weight
    units = tl.where(known, weight, 0.0).to(tl.float64) * _UNIT
    slack = tl.where(weight > 0, V, 0).to(tl.float64)
    least = tl.maximum(units * _LESS - slack, 0.0).to(tl.int64)
    most = tl.where(known, units * _MORE + slack + 1.0, _ALL)
    most = tl.where(weight == 0.0, 0.0, tl.minimum(most, _ALL))
    return least, most.to(tl.int64)
