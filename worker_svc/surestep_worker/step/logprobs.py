"""Log-probabilities under the model's own distribution, before penalties and temperature.

They are computed for whole windows and reported for the emitted tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from surestep_common.invariants import Int32Array, IntArray
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from .batch import Geometry
from .sampling import LogprobParams

# Logits processed at a time: what fits a CPU's cache; on a GPU what keeps it busy, with 25 bytes or
# so of scratch memory each.
_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 23


class Score(NamedTuple):
    """Log-probabilities of given tokens, and the most likely tokens of the same positions."""

    logprob: torch.Tensor  # f32[M]
    rank: torch.Tensor  # i64[M] 1 = most likely; among equals the lowest id comes first
    top_ids: torch.Tensor  # i64[M,width] most likely first
    top_logprobs: torch.Tensor  # f32[M,width]


def score(logits: torch.Tensor, token_id: torch.Tensor, width: int) -> Score:
    """Score token_id i64[M] and the `width` best tokens under logits f32[M,V]. Does not wait.

    Works on a bounded number of logits at a time, which changes no bit: all ops are by row.
    """
    width = min(width, logits.shape[1])
    size = max(1, (_CHUNK if logits.is_cpu else _DEVICE_CHUNK) // logits.shape[1])
    parts = [
        _score(some, ids, width)
        for some, ids in zip(torch.split(logits, size), torch.split(token_id, size), strict=True)
    ]
    return Score(*(torch.cat(column) for column in zip(*parts, strict=True)))


def columns(
    row: IntArray, token_id: IntArray, num_top: IntArray, scores: Score
) -> sampling_pb2.LogprobColumns:
    """Return one entry per position [M], with at most num_top[m] alternatives each."""
    width = scores.top_ids.shape[1]
    num_top = num_top.clip(max=width)
    shown = torch.from_numpy(np.arange(width) < num_top[:, None])
    return sampling_pb2.LogprobColumns(
        row=row.tolist(),
        token_id=token_id.tolist(),
        logprob=scores.logprob.tolist(),
        rank=scores.rank.tolist(),
        num_top=num_top.tolist(),
        top_token_ids=scores.top_ids[shown].tolist(),
        top_logprobs=scores.top_logprobs[shown].tolist(),
    )


def _score(logits: torch.Tensor, token_id: torch.Tensor, width: int) -> Score:
    token_id = token_id.unsqueeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    gap = logits.amax(dim=1, keepdim=True) - logits
    mine = gap.gather(1, token_id)
    ahead = (gap < mine) | ((gap == mine) & (ids < token_id))
    logprobs = logits.log_softmax(dim=1)
    top_ids = top_tokens(gap, width)
    return Score(
        logprobs.gather(1, token_id).squeeze(1),
        1 + ahead.sum(dim=1),
        top_ids,
        logprobs.gather(1, top_ids),
    )


class LogprobPlan(NamedTuple):
    """Positions of a step whose log-probabilities are reported, with how many alternatives."""

    scored: Int32Array  # [M + P] positions: see Extras, as the next
    prompt_ids: Int32Array  # [P]
    window: Int32Array  # [M] of each position
    offset: Int32Array  # [M] its index within the window
    num_top: IntArray  # [M + P]

    @classmethod
    def of(cls, geometry: Geometry, params: LogprobParams) -> LogprobPlan | None:
        """Return None when no request of the step has log-probabilities requested."""
        slot, requested = geometry.window_slot, params.emitted[geometry.window_slot]
        index, prompt = np.flatnonzero(requested[geometry.position_window]), geometry.prompt
        num_positions = len(geometry.position_window)
        if not len(index) and not len(prompt.row):
            return None
        window = geometry.position_window[index]
        of_prompt = num_positions + np.arange(len(prompt.row))
        scored = np.concatenate((index, of_prompt)).astype(np.int32)
        ids = prompt.token_id.astype(np.int32)
        offset = geometry.rows.position_offset[index]
        num_top = (
            params.num_top[slot[window]],
            params.num_top_prompt[prompt.slot],
        )
        return cls(scored, ids, window, offset, np.concatenate(num_top))

    @property
    def max_num_top(self) -> int:
        """Return the most alternatives that any position has."""
        return int(self.num_top.max())

    def fill(
        self,
        result: pb.StepResult,
        geometry: Geometry,
        ids: IntArray,
        n_emitted: IntArray,
        scores: Score,
    ) -> None:
        """Fill the columns of `result`, from ids [V, K+1] and n_emitted [V] of the windows."""
        emitted = np.flatnonzero(self.offset < n_emitted[self.window])
        window, offset = self.window[emitted], self.offset[emitted]
        if len(self.offset):
            row = geometry.window_row[window]
            result.logprobs.CopyFrom(self._columns(row, ids[window, offset], emitted, scores))
        prompt = geometry.prompt
        if len(prompt.row):
            index = len(self.offset) + np.arange(len(prompt.row))
            scored = self._columns(prompt.row, prompt.token_id, index, scores)
            result.prompt_logprobs.CopyFrom(scored)

    def _columns(
        self, row: IntArray, ids: IntArray, index: IntArray, scores: Score
    ) -> sampling_pb2.LogprobColumns:
        return columns(row, ids, self.num_top[index], Score(*(part[index] for part in scores)))


def top_tokens(gap: torch.Tensor, width: int) -> torch.Tensor:
    """Return ids i64[N,width] of the smallest gaps f32[N,V], >= 0; the lowest id among equals."""
    # One integer holds gap and id: floats that are not negative sort like their bits.
    key = gap.view(torch.int32).long()
    key.bitwise_left_shift_(32).bitwise_or_(torch.arange(gap.shape[1], device=gap.device))
    head = _smallest(key, width)
    return head & 0xFFFFFFFF


def _smallest(key: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `width` smallest keys of each row, ascending. May reorder `key`."""
    if key.device.type != "cpu":
        return key.topk(width, dim=1, largest=False, sorted=True).values
    # numpy's partition and sort are 10 to 40 times as fast as topk and sort of torch 2.13.
    values = key.numpy()
    if 0 < width < values.shape[1]:
        values.partition(width - 1, axis=1)
    head = values[:, :width].copy()
    head.sort(axis=1)
    return torch.from_numpy(head)
