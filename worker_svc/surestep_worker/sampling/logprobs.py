"""Log-probabilities of the model's own distribution, before penalties and temperature."""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_proto import sampling_pb2 as pb

from .top_tokens import top_tokens

# Logits processed at a time: what fits a CPU's cache; on a GPU what keeps it busy, with 25 bytes or
# so of scratch memory each.
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 23


class Logprobs(NamedTuple):
    """One entry per position, in the columns of pb.LogprobColumns."""

    row: torch.Tensor  # i64[M] index into the plan's rows
    token_id: torch.Tensor  # i64[M]
    logprob: torch.Tensor  # f32[M]
    rank: torch.Tensor  # i64[M] 1 = most likely; among equals the lowest id comes first
    num_top: torch.Tensor  # i64[M]
    top_token_ids: torch.Tensor  # i64[sum of num_top] most likely first
    top_logprobs: torch.Tensor  # f32[sum of num_top]

    def to_proto(self) -> pb.LogprobColumns:
        return pb.LogprobColumns(**{name: part.tolist() for name, part in self._asdict().items()})


class Score(NamedTuple):
    """How likely given tokens are, and the most likely tokens of the same positions."""

    logprob: torch.Tensor  # f32[M]
    rank: torch.Tensor  # i64[M]
    top_ids: torch.Tensor  # i64[M,width]
    top_logprobs: torch.Tensor  # f32[M,width]


def score(logits: torch.Tensor, token_id: torch.Tensor, width: int) -> Score:
    """Score token_id i64[M] and the `width` best tokens under logits f32[M,V]. Does not wait.

    Works on a bounded number of logits at a time, which changes no bit: all ops are by row.
    """
    size = max(1, (_CHUNK if logits.is_cpu else _DEVICE_CHUNK) // logits.shape[1])
    parts = [
        _score(some, ids, width)
        for some, ids in zip(torch.split(logits, size), torch.split(token_id, size), strict=True)
    ]
    return Score(*(torch.cat(column) for column in zip(*parts, strict=True)))


def columns(
    row: torch.Tensor, token_id: torch.Tensor, num_top: torch.Tensor, scores: Score
) -> Logprobs:
    """Return one entry per position [M], with num_top[m] alternatives each."""
    width = scores.top_ids.shape[1]
    shown = torch.arange(width, device=row.device) < num_top.unsqueeze(1)
    return Logprobs(
        row, token_id, scores.logprob, scores.rank, num_top,
        scores.top_ids[shown], scores.top_logprobs[shown],
    )  # fmt: skip


def _score(logits: torch.Tensor, token_id: torch.Tensor, width: int) -> Score:
    token_id = token_id.unsqueeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    gap = logits.amax(dim=1, keepdim=True) - logits
    mine = gap.gather(1, token_id)
    ahead = (gap < mine) | ((gap == mine) & (ids < token_id))
    logprobs = logits.log_softmax(dim=1)
    top_ids = top_tokens(gap, width).ids
    return Score(
        logprobs.gather(1, token_id).squeeze(1),
        1 + ahead.sum(dim=1),
        top_ids,
        logprobs.gather(1, top_ids),
    )
