"""The one pipeline that chooses every token, of plain decoding and of verification alike.

    allowed ids, bias -> min_tokens -> penalties -> bad words -> argmax                    (greedy)
                                         ... -> temperature -> min_p -> top_k -> top_p -> draw

The order is vLLM's. Row n is a function of its own logits, history and parameters alone: which rows
stand beside it, and whether it belongs to a window, changes no bit of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_kernels.argmax import argmax
from surestep_kernels.choose import SATURATED
from surestep_proto import engine_pb2 as pb

from .features import Rows, apply_feature
from .slots import SamplingSlots

_CHUNK = 1 << 18  # logits copied and shaped at a time: bounds memory, stays near the cache


class Sampled(NamedTuple):
    """The choice of every row."""

    ids: torch.Tensor  # i64[N]; 0 where status is not OK
    status: torch.Tensor  # u8[N] pb.RowStatus


def sample(
    logits: torch.Tensor,
    slot: torch.Tensor,
    length: torch.Tensor,
    tokens: torch.Tensor,
    slots: SamplingSlots,
) -> Sampled:
    """Choose the token at index length[n] of slot[n], from logits[n], for every row n.

    Args:
        logits: f32[N,V], left unchanged.
        slot: i64[N] on the host; rows of a window share theirs.
        length: i64[N] history length: tokens[slot, :length], earlier drafts of the window included.
        tokens: i32[S,W] token table.
        slots: parameters.
    """
    choice = _best(logits)
    busy = slots.shaped[slot] & (choice.status == pb.OK).cpu()
    if busy.any():
        rows = Rows(slot, length, slots.prompt_len[slot], tokens)
        for index in torch.split(busy.nonzero().squeeze(1), max(1, _CHUNK // logits.shape[1])):
            part = _choose(logits[index], rows.pick(index), slots)
            choice.ids[index], choice.status[index] = part.ids, part.status
    return choice


def _choose(z: torch.Tensor, rows: Rows, slots: SamplingSlots) -> Sampled:
    for feature in slots.features:
        apply_feature(feature, z, rows)
    choice = _best(z)
    random = slots.draws.active[rows.slot] & (choice.status == pb.OK).cpu()
    if random.any():
        part = z if random.all() else z[random]
        choice.ids[random] = slots.draws.draw(part, part.amax(dim=1), rows.pick(random))
    return choice


def _best(z: torch.Tensor) -> Sampled:
    """Argmax of z f32[N,V], and what is wrong with rows that have none."""
    peak = z.amax(dim=1)  # NaN if any logit is
    status = torch.full_like(peak, pb.NON_FINITE, dtype=torch.uint8)
    status[peak.isfinite()] = pb.OK
    status[peak == -torch.inf] = pb.NO_CANDIDATE
    status[peak == SATURATED] = pb.SHAPING_OVERFLOW
    return Sampled(argmax(z).masked_fill_(status != pb.OK, 0), status)
