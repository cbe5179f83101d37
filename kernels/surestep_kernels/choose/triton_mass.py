"""The mass of step.mass: the same operations; launch without fusing them."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from .mass import ALL, FARTHEST, LN2_HIGH, LN2_LOW, LOG2_E, POLYNOMIAL, ROUNDS


def _bits(x: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    return int(bits)


_FARTHEST_BITS: tl.constexpr = tl.constexpr(_bits(FARTHEST))
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_LN2_HIGH: tl.constexpr = tl.constexpr(LN2_HIGH)
_LN2_LOW: tl.constexpr = tl.constexpr(LN2_LOW)
_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)
_ROUNDS_BITS: tl.constexpr = tl.constexpr(_bits(ROUNDS))
_P0: tl.constexpr = tl.constexpr(POLYNOMIAL[0])
_P1: tl.constexpr = tl.constexpr(POLYNOMIAL[1])
_P2: tl.constexpr = tl.constexpr(POLYNOMIAL[2])
_P3: tl.constexpr = tl.constexpr(POLYNOMIAL[3])
_P4: tl.constexpr = tl.constexpr(POLYNOMIAL[4])
_P5: tl.constexpr = tl.constexpr(POLYNOMIAL[5])
_ALL: tl.constexpr = tl.constexpr(float(ALL))


@triton.jit
def mass_of(bits):
    """Return the mass i64 of tokens whose gaps have these bits; 0 beyond the farthest gap."""
    gap = tl.minimum(bits, _FARTHEST_BITS).to(tl.float32, bitcast=True)
    rounded = gap * _LOG2_E + _ROUNDS
    n = rounded - _ROUNDS
    x = (n * _LN2_HIGH - gap) + n * _LN2_LOW
    y = ((((x * _P0 + _P1) * x + _P2) * x + _P3) * x + _P4) * x + _P5
    y = y * (x * x) + x + 1.0
    # From the bits: conversions are slow. y lies between 1/2 and 2, its mantissa is 24 bits.
    mantissa = y.to(tl.int32, bitcast=True)
    whole = ((mantissa & 0x7FFFFF) | 0x800000) << ((mantissa >> 23) - 126)
    shift = rounded.to(tl.int32, bitcast=True) - _ROUNDS_BITS
    return (whole.to(tl.int64) << 16) >> shift.to(tl.int64)


@triton.jit
def target_mass(top_p, total):
    """Return the mass below which the mass in front of a token of the nucleus must be."""
    target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64))
    return tl.minimum(target, _ALL).to(tl.int64)
