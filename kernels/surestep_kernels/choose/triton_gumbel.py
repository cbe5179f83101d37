"""The counter-based noise of surestep_kernels.choose.gumbel: the same hash, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed_low, seed_high, position):
    """Return the two halves of a row's key, u32[1] each."""
    # One element instead of a scalar: the interpreter warns of scalars that wrap around.
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64) + tl.zeros((1,), tl.uint64)
    high = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) + tl.zeros((1,), tl.uint64)
    where = position.to(tl.uint64) + tl.zeros((1,), tl.uint64)
    key = _mix64((low | (high << 32)) + 0x5375726553746570)
    key = _mix64(key + where * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def gumbel(ids, k0, k1):
    """Return noise f32 of token ids i32[B] in the row with the key (k0, k1)."""
    x = ids.to(tl.uint32) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16) ^ k0
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ k1
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    v = (x.to(tl.int32, bitcast=True).to(tl.float64) + 2147483648.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(v))).to(tl.float32)
