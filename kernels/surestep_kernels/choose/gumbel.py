"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

The Gumbel-max trick turns sampling into `argmax(z + G)`. As G has no state, a token is the same
whatever batch, window or process draws it, and one noise value serves exactly one emission.

    row key  = mix64(mix64(seed + DOMAIN) + position * GOLDEN)       64 bits, split in k0 (low), k1
    h        = mix32 of mix32(id + GOLDEN32) ^ k0, with k1 folded in after the first multiplication
    V        = (h + 2**31 + 0.5) / 2**32, h read as a signed number  uniform on the open (0, 1)
    G        = -log(-log V)

The tail that wins an argmax is V near 1. V is exact in float64 there and so is 1 - V, hence plain
`log` keeps its full relative precision and G reaches 22.9; 24 bits would cut it at 16.6 and rare
tokens would never be drawn. G is rounded to float32 last, which hides the last bits in which the
`log` of one platform differs from another's.

mix64 is the finaliser of splitmix64 (Steele, Lea, Flood 2014), mix32 is "lowbias32" (C. Wellons).
"""

from __future__ import annotations

import torch

_DOMAIN = 0x5375726553746570  # keeps this stream apart from other uses of the same seed
_GOLDEN = 0x9E3779B97F4A7C15


def gumbel_noise(ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Noise f32[N,V] of ids i64[V] or i64[N,V] for rows with these seeds and positions i64[N]."""
    key = _mix64(_mix64(seeds + _DOMAIN) + positions * _signed64(_GOLDEN))
    k0, k1 = key.to(torch.int32).unsqueeze(1), (key >> 32).to(torch.int32).unsqueeze(1)
    stage = _mix32((ids + 0x9E3779B9).to(torch.int32))
    v = _mix32(stage ^ k0, k1).double()
    v.add_(2.0**31 + 0.5).mul_(2.0**-32)
    return v.log_().neg_().log_().neg_().float()


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right64(x, 30)) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right64(x, 27)) * _signed64(0x94D049BB133111EB)
    return x ^ _shift_right64(x, 31)


def _mix32(x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
    """Mix x i32 in place."""
    scratch = torch.empty_like(x)
    _xor_shift32(x, 16, scratch).mul_(0x7FEB352D)
    if key is not None:
        x.bitwise_xor_(key)
    _xor_shift32(x, 15, scratch).mul_(0x846CA68B - (1 << 32))
    return _xor_shift32(x, 16, scratch)


def _xor_shift32(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _shift_right64(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts signed numbers arithmetically; the hash is defined on unsigned ones.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
