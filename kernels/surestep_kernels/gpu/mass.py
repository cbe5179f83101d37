"""The mass of surestep_kernels.mass: the same operations, to be launched without fusing them."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from surestep_kernels.mass import ALL, FARTHEST, LN2_HIGH, LN2_LOW, LOG2_E, POLYNOMIAL

_FARTHEST: tl.constexpr = tl.constexpr(*struct.unpack("<i", struct.pack("<f", FARTHEST)))  # bits
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_LN2_HIGH: tl.constexpr = tl.constexpr(LN2_HIGH)
_LN2_LOW: tl.constexpr = tl.constexpr(LN2_LOW)
_P0: tl.constexpr = tl.constexpr(POLYNOMIAL[0])
_P1: tl.constexpr = tl.constexpr(POLYNOMIAL[1])
_P2: tl.constexpr = tl.constexpr(POLYNOMIAL[2])
_P3: tl.constexpr = tl.constexpr(POLYNOMIAL[3])
_P4: tl.constexpr = tl.constexpr(POLYNOMIAL[4])
_P5: tl.constexpr = tl.constexpr(POLYNOMIAL[5])
_ALL: tl.constexpr = tl.constexpr(float(ALL))


@triton.jit
def mass_of(bits):
    """Mass i64 of tokens whose gaps have these bits; none of what is farther than any gap."""
    gap = tl.minimum(bits, _FARTHEST).to(tl.float32, bitcast=True)
    n = tl.floor(gap * _LOG2_E + 0.5)
    x = (n * _LN2_HIGH - gap) + n * _LN2_LOW
    y = ((((x * _P0 + _P1) * x + _P2) * x + _P3) * x + _P4) * x + _P5
    y = y * (x * x) + x + 1.0
    whole = (y * 16777216.0).to(tl.int32).to(tl.int64)
    return (whole << 16) >> n.to(tl.int32).to(tl.int64)


@triton.jit
def mass_wanted(top_p, total):
    """A token is in the nucleus when the mass in front of it is below this."""
    wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64))
    return tl.minimum(wanted, _ALL).to(tl.int64)
