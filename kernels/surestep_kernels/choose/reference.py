"""From logits to one token per position: argmax, or a draw with counter-based noise."""

from __future__ import annotations

from enum import IntEnum
from typing import Generic, NamedTuple, Protocol

import torch
from torch import Tensor

from surestep_kernels.step_columns import Column

from .gumbel import gumbel_noise
from .mass import mass_of, target_mass


class RowStatus(IntEnum):
    """The status of a row, with the numbers of worker.proto."""

    OK = 1
    NON_FINITE = 2
    NO_CANDIDATE = 3
    SHAPING_OVERFLOW = 4


SATURATED = torch.finfo(torch.float32).max  # the most that shaping makes of a finite logit


class DrawParams(NamedTuple, Generic[Column]):
    """The sampling parameters of each window: one entry per window."""

    temperature: Column  # f32[V] 0 = greedy
    seed_low: Column  # i32[V] the lower half of the seed's bits
    seed_high: Column  # i32[V]
    max_gap: Column  # f32[V] -log(min_p); infinite = off
    top_k: Column  # i32[V] vocabulary size = off
    top_p: Column  # f32[V] infinite = off


class Chosen(NamedTuple):
    """The token chosen at every position."""

    ids: Tensor  # i32[N]; 0 where the status is not OK
    status: Tensor  # i32[N] RowStatus


class Choose(Protocol):
    def __call__(
        self,
        z: Tensor,
        window: Tensor,
        length: Tensor,
        params: DrawParams,
        *,
        random: bool,
        truncated: bool,
    ) -> Chosen: ...


def choose_reference(
    z: Tensor,
    window: Tensor,
    length: Tensor,
    params: DrawParams,
    *,
    random: bool,
    truncated: bool,
) -> Chosen:
    """Choose the token at index length[n] i32[N] from the logits z f32[N, V].

    window i32[N] is the index of each position's parameters. Tokens are ordered by logit, greatest
    first, then by lowest id; min_p, top_k and top_p keep a leading part of this order. top_p
    measures the mass that the other two left, in whole numbers (see surestep_kernels.choose.mass).
    `random` and `truncated` say whether any row draws at all, and whether any row restricts what it
    draws from; the host knows both.

    A row's status is not OK if its greatest logit is NaN or +inf (the model is at fault, since
    shaping saturates finite logits), if it is SATURATED (the request is at fault), or if all logits
    are -inf.
    """
    peak = z.amax(dim=1)  # NaN if any logit is
    status = torch.full_like(window, RowStatus.NON_FINITE)
    status[peak.isfinite()] = RowStatus.OK
    status[peak == -torch.inf] = RowStatus.NO_CANDIDATE
    status[peak == SATURATED] = RowStatus.SHAPING_OVERFLOW
    usable = status == RowStatus.OK
    ids = _first_greatest(z)
    if random:
        p = DrawParams(*(column[window.long()] for column in params))
        draws = usable & (p.temperature > 0)
        gap = (peak.unsqueeze(1) - z).div_(p.temperature.unsqueeze(1))
        score = torch.where(_kept(gap, p), -gap, -torch.inf) if truncated else -gap
        score += gumbel_noise(torch.arange(z.shape[1], device=z.device), _seeds(p), length.long())
        ids = torch.where(draws, _first_greatest(score), ids)
    return Chosen(torch.where(usable, ids, 0).int(), status)


def _first_greatest(x: Tensor) -> Tensor:
    """Return the lowest index of the greatest element of each row."""
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(x == x.amax(dim=1, keepdim=True), columns, x.shape[1] - 1).amin(dim=1)


def _seeds(params: DrawParams) -> Tensor:
    return (params.seed_high.long() << 32) | (params.seed_low.long() & 0xFFFFFFFF)


def _kept(gap: Tensor, p: DrawParams) -> Tensor:
    """Return which tokens may be drawn, bool[N, V]."""
    ordered, order = gap.sort(dim=1, stable=True)
    rank = torch.arange(gap.shape[1], device=gap.device)
    left = (ordered <= p.max_gap.unsqueeze(1)) & (rank < p.top_k.unsqueeze(1))
    mass = torch.where(left, mass_of(ordered), 0)
    before = mass.cumsum(dim=1) - mass
    kept = left & (before < target_mass(p.top_p, mass.sum(dim=1)).unsqueeze(1))
    return torch.zeros_like(kept).scatter_(1, order, kept)
