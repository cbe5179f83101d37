"""Which requests have log-probabilities reported."""

from __future__ import annotations

import numpy as np
from surestep_proto import sampling_pb2 as pb


class LogprobParams:
    """Which log-probabilities each slot has reported, with how many alternatives.

    The NULL slot has none.
    """

    def __init__(self, num_slots: int) -> None:
        self.emitted, self.prompt = np.zeros((2, num_slots + 1), dtype=np.bool_)
        self.num_top, self.num_top_prompt = np.zeros((2, num_slots + 1), dtype=np.int64)

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        self.emitted[slot] = params.want_logprobs
        self.prompt[slot] = params.want_prompt_logprobs
        self.num_top[slot] = params.num_top_logprobs
        self.num_top_prompt[slot] = params.num_top_prompt_logprobs

    def free(self, slot: int) -> None:
        self.emitted[slot] = self.prompt[slot] = False
