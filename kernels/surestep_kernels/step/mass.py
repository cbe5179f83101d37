"""The mass of a token in whole numbers, by which top_p measures.

A sum of floats depends on its order, and exp on whose it is: a nucleus that is measured so may end
a token earlier on one machine than on another, or in one kernel than in the next. Here the mass is
exp(-gap) in units of 2**-40 of the best token's, made of float32 operations that IEEE 754 defines
to the last bit, none of them fused; sums of whole numbers have no order.

    n = round(gap / ln 2),  x = n ln 2 - gap,  mass = exp(x) 2**(40 - n)

ln 2 is subtracted in two parts (Cody and Waite 1980), exp(x) is the polynomial of Moshier's Cephes
library: relative error 2**-23, then cut to whole units. What lies more than 27.7 behind has none.
"""

from __future__ import annotations

from torch import Tensor

UNIT_BITS = 40  # the best token has 2**40
ALL = 1 << 62  # no token has more in front: a vocabulary has 2**22 tokens at most
FARTHEST = 29.0  # gaps from here on weigh nothing
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
ROUNDS = 1.5 * 2**23  # added and taken away again, it leaves the nearest whole number, halves even
_MANTISSA_BITS = 24


def mass_of(gap: Tensor) -> Tensor:
    """Mass i64 of tokens with these gaps f32, none negative nor NaN."""
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
    """A token is in the nucleus when the mass in front of it is below this, i64; of top_p f32 or
    f64, infinite = off, and the mass i64 of all that it is measured by."""
    return (top_p.double() * total.double()).ceil_().clamp_(max=float(ALL)).long()
