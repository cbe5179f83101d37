"""Seeds of the sequences of one request."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sibling_seed(seed: int, sibling: int) -> int:
    """Return the seed of sequence `sibling` of a request: its own stream of noise.

    Sibling 0 has the request's seed, sibling i the i-th output of splitmix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014) started there.
    """
    if sibling == 0:
        return seed & _MASK64
    z = (seed + sibling * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
