"""Draws with the noise of surestep_kernels.choose.gumbel, and the argmax that settles them."""

from __future__ import annotations

import torch
from surestep_kernels.choose import gumbel_noise

_CHUNK = 1 << 18  # elements per pass: bounds the scratch memory, stays near the cache


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Lowest index of the maximum of each row of `x` f32[N,V] -> i64[N]. NaN counts as maximum.

    On the CPU this is numpy's: 25 times the speed of torch 2.13's, and as strict on ties.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(axis=1))
    return x.argmax(dim=1)


def gumbel_argmax(
    z: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token id per row from softmax(z).

    Args:
        z: f32[N,V] logits, temperature applied; -inf never wins.
        seeds: i64[N], the bits of an unsigned 64-bit seed.
        positions: i64[N], index in the sequence of the token to draw.
        ids: i64[N,V] token ids of the columns; by default column = id.

    Returns:
        i64[N]; the lowest id wins ties. A row of -inf alone yields its lowest id.
    """
    columns = torch.arange(z.shape[1], device=z.device) if ids is None else ids
    scores = torch.empty_like(z)
    step = max(1, _CHUNK // max(1, z.shape[1]))
    for start in range(0, z.shape[0], step):
        rows = slice(start, start + step)
        some = columns if ids is None else columns[rows]
        torch.add(z[rows], gumbel_noise(some, seeds[rows], positions[rows]), out=scores[rows])
    if ids is None:
        return argmax(scores)
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, ids, torch.iinfo(torch.int64).max).amin(dim=1)
