"""Log-probabilities of a step: computed for whole windows, reported for the emitted tokens."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import torch
from surestep_common.invariants import Int32Array
from surestep_kernels.step_columns import Column
from surestep_proto import worker_pb2 as pb
from torch import Tensor

from surestep_worker.ledger.plan import IntArray
from surestep_worker.sampling.logprob_params import LogprobParams
from surestep_worker.sampling.logprobs import Logprobs, Score, columns, score

from .geometry import Geometry


class ScoredPositions(NamedTuple, Generic[Column]):
    """Positions whose tokens are scored: M positions of windows, then P positions of prompts."""

    at: Column  # i32[M + P] indices into the step's positions
    prompt_ids: Column  # i32[P] tokens that the prompt has there


class LogprobPlan(NamedTuple):
    """Positions of a step whose log-probabilities are reported, with how many alternatives."""

    positions: ScoredPositions[Int32Array]
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
        at = np.concatenate((index, of_prompt)).astype(np.int32)
        ids = prompt.token_id.astype(np.int32)
        offset = geometry.rows.position_offset[index]
        num_top = (
            params.num_top[slot[window]],
            params.num_top_prompt[prompt.slot],
        )
        return cls(ScoredPositions(at, ids), window, offset, np.concatenate(num_top))

    @property
    def max_num_top(self) -> int:
        """Return the most alternatives that any position has."""
        return int(self.num_top.max())

    def fill(
        self, result: pb.StepResult, geometry: Geometry, ids: Tensor, n_emitted: IntArray,
        scores: Score,
    ) -> None:  # fmt: skip
        """Fill the columns of `result`, from ids [V, K+1] and n_emitted [V] of the windows."""
        emitted = np.flatnonzero(self.offset < n_emitted[self.window])
        window, offset = self.window[emitted], self.offset[emitted]
        if len(self.offset):
            row = torch.from_numpy(geometry.window_row[window])
            result.logprobs.CopyFrom(
                self._columns(row, ids[window, offset], emitted, scores).to_proto()
            )
        prompt = geometry.prompt
        if len(prompt.row):
            index = len(self.offset) + np.arange(len(prompt.row))
            tokens = torch.from_numpy(prompt.row), torch.from_numpy(prompt.token_id)
            result.prompt_logprobs.CopyFrom(self._columns(*tokens, index, scores).to_proto())

    def _columns(self, row: Tensor, ids: Tensor, index: IntArray, scores: Score) -> Logprobs:
        num_top = torch.from_numpy(self.num_top[index]).clamp(max=scores.top_ids.shape[1])
        return columns(row, ids, num_top, Score(*(part[index] for part in scores)))


def score_positions(
    logits: Tensor, chosen: Tensor, positions: ScoredPositions, width: int
) -> Score:
    """Score chosen tokens [N] and tokens of prompts [P] under logits [N + P, V], on the device."""
    num_chosen = len(positions.at) - len(positions.prompt_ids)
    index = positions.at.long()
    ids = torch.cat((chosen[index[:num_chosen]], positions.prompt_ids)).long()
    return score(logits[index], ids, min(width, logits.shape[1]))
