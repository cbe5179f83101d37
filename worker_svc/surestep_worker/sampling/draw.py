"""Random draws: temperature, min_p, top_k and top_p, then the Gumbel-max trick.

Everything here works on the *gap* of a token, (maximum - logit) / temperature: zero for the best
token, growing from there. That never overflows where it matters, whatever the temperature; its
float bits sort like integers; and min_p is a bound on it.
"""

from __future__ import annotations

import math

import torch
from surestep_kernels.gumbel import gumbel_argmax
from surestep_kernels.mass import UNIT_BITS, mass_of, mass_wanted
from surestep_proto import engine_pb2 as pb

from .features import Rows
from .head import Head, head_of

_HEAD = 1024  # candidates looked at first; a row whose nucleus is larger looks at 8 times as many
_FLOAT_ERROR = 2.0**-16  # of a sum of exponentials, and of masses, at most: relative


class Draws:
    """Parameters of the slots that sample at a temperature above zero."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.active = torch.zeros(num_slots, dtype=torch.bool)
        self._truncates = torch.zeros(num_slots, dtype=torch.bool)
        self._vocab_size = vocab_size
        self._temperature = torch.ones(num_slots, device=device)
        self._seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._max_gap = torch.zeros(num_slots, device=device)  # min_p
        self._top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._top_p = torch.zeros(num_slots, dtype=torch.float64, device=device)

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        self.active[slot] = params.temperature > 0
        self._truncates[slot] = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
        self._temperature[slot] = params.temperature
        self._seed[slot] = params.seed - (1 << 64) if params.seed >> 63 else params.seed
        self._max_gap[slot] = -math.log(params.min_p) if params.min_p > 0 else math.inf
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = params.top_p if params.top_p < 1 else math.inf

    def free(self, slot: int) -> None:
        self.active[slot] = False

    def draw(self, z: torch.Tensor, peak: torch.Tensor, rows: Rows) -> torch.Tensor:
        """One id per row of the logits z f32[N,V], whose row maxima are peak f32[N] -> i64[N]."""
        peak = peak + 0.0  # of zeros the positive one: gaps have a sign that their bits would show
        gap = (peak.unsqueeze(1) - z).div_(self._temperature[rows.slot].unsqueeze(1))
        cut = self._truncates[rows.slot]
        ids = torch.zeros_like(rows.length)
        if cut.any():
            ids[cut] = self._draw_from_head(gap[cut], rows.pick(cut), _HEAD)
        if not cut.all():
            z, some = gap[~cut].neg_(), rows.pick(~cut)
            ids[~cut] = gumbel_argmax(z, self._seed[some.slot], some.length)
        return ids

    def _draw_from_head(self, gap: torch.Tensor, rows: Rows, width: int) -> torch.Tensor:
        width = min(width, gap.shape[1])
        head = head_of(gap, width)
        count, settled = self._candidates(gap, head, rows.slot)
        outside = torch.arange(width, device=gap.device) >= count.unsqueeze(1)
        z = head.gap.neg().masked_fill_(outside, -math.inf)
        ids = gumbel_argmax(z, self._seed[rows.slot], rows.length, head.ids)
        if width < gap.shape[1] and not settled.all():
            wider = ~settled
            ids[wider] = self._draw_from_head(gap[wider], rows.pick(wider), 8 * width)
        return ids

    def _candidates(
        self, gap: torch.Tensor, head: Head, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of the head may be drawn i64[N]; whether no wider head adds any bool[N].

        Every rule keeps a leading part. top_p measures the mass that min_p and top_k left, and
        keeps a token when the mass in front of it is below p.
        """
        width, vocab = head.gap.shape[1], gap.shape[1]
        column = torch.arange(width, device=gap.device)
        max_gap, top_k = self._max_gap[slot].unsqueeze(1), self._top_k[slot].unsqueeze(1)
        left = ((head.gap <= max_gap) & (column < top_k)).sum(dim=1)
        mass = mass_of(head.gap).cumsum(dim=1)
        total = mass.gather(1, left.unsqueeze(1) - 1).squeeze(1)
        only_top_p = (max_gap.isinf() & (top_k == self._vocab_size)).squeeze(1)
        if width < vocab and only_top_p.any():
            top_p = self._top_p[slot][only_top_p]
            total[only_top_p] = _mass_of_rows(gap[only_top_p], mass[only_top_p, :-1], top_p)
        wanted = mass_wanted(self._top_p[slot], total).unsqueeze(1)
        count = torch.minimum(left, 1 + (mass[:, :-1] < wanted).sum(dim=1))
        return count, (left < width) | (only_top_p & (count < width))


def _mass_of_rows(gap: torch.Tensor, before: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mass i64[N] of all tokens, or another number that top_p [N] cuts the head at the same place.

    `before` i64[N,M] is the mass in front of each token of the head but the first. The exact mass
    of a whole vocabulary takes ten times as long as the bounds that floats give of it, between
    which there hardly ever is a token.
    """
    about = gap.neg().exp_().sum(dim=1).double() * (1 << UNIT_BITS)
    slack = about * _FLOAT_ERROR + gap.shape[1]  # each token's mass is cut to whole units
    low, high = (about - slack).long(), (about + slack).long()
    counts = ((before < mass_wanted(top_p, t).unsqueeze(1)).sum(dim=1) for t in (low, high))
    unsure = torch.ne(*counts)
    if unsure.any():
        low[unsure] = mass_of(gap[unsure]).sum(dim=1)
    return low
