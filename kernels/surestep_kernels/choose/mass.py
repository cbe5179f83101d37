"""The mass of a token as a whole number, in which top_p is measured.

A sum of floats depends on its order, and exp on its implementation: a nucleus measured with them
may end one token earlier on one machine, or in one kernel, than on another. Here the mass is
exp(-gap) in units of 2**-40 of the best token's mass, computed with float32 operations that IEEE
754 defines to the last bit, none of them fused; sums of whole numbers have no order.

    n = round(gap / ln 2),  x = n ln 2 - gap,  mass = exp(x) 2**(40 - n)

ln 2 is subtracted in two parts (Cody and Waite 1980), exp(x) is the polynomial of Moshier's Cephes
library: relative error 2**-23, then truncated to whole units. Tokens more than 27.7 behind the best
have no mass.
"""

from __future__ import annotations

from torch import Tensor

UNIT_BITS = 40  # the best token has 2**40
ALL = 1 << 62  # more than the mass in front of any token: a vocabulary has 2**22 tokens at most
FARTHEST = 29.0  # gaps from here on have no mass
LOG2_E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
ROUNDS = 1.5 * 2**23  # adding and subtracting it rounds to the nearest whole number, halves to even
_MANTISSA_BITS = 24


def mass_of(gap: Tensor) -> Tensor:
    """Return the mass i64 of tokens with these gaps f32, which must not be negative or NaN."""
    gap = gap.clamp(max=FARTHEST)
    n = gap.mul(LOG2_E).add_(ROUNDS).sub_(ROUNDS)
    x = n.mul(LN2_HIGH).sub_(gap).add_(n.mul(LN2_LOW))
    y = x * POLYNOMIAL[0]
    for term in POLYNOMIAL[1:-1]:
        y.add_(term).mul_(x)
    y.add_(POLYNOMIAL[-1]).mul_(x.square()).add_(x).add_(1.0)
    whole = y.mul_(float(1 << _MANTISSA_BITS)).int().long()  # through i32: vectors on every CPU
    return whole.bitwise_left_shift_(UNIT_BITS - _MANTISSA_BITS).bitwise_right_shift_(n.int())


def target_mass(top_p: Tensor, total: Tensor) -> Tensor:
    """Return the mass i64 below which the mass in front of a token of the nucleus must be, given
    top_p (f32 or f64, infinite = off) and the total mass i64."""
    return (top_p.double() * total.double()).ceil_().clamp_(max=float(ALL)).long()
