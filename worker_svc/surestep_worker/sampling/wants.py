"""Who wants log-probabilities."""

from __future__ import annotations

import torch
from surestep_proto import engine_pb2 as pb


class LogprobWants:
    """Which slots want log-probabilities, and how many alternatives."""

    def __init__(self, num_slots: int) -> None:
        self.emitted = torch.zeros(num_slots, dtype=torch.bool)
        self.prompt = torch.zeros(num_slots, dtype=torch.bool)
        self.num_top = torch.zeros(num_slots, dtype=torch.int64)
        self.num_top_prompt = torch.zeros(num_slots, dtype=torch.int64)

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        self.emitted[slot] = params.want_logprobs
        self.prompt[slot] = params.want_prompt_logprobs
        self.num_top[slot] = params.num_top_logprobs
        self.num_top_prompt[slot] = params.num_top_prompt_logprobs

    def free(self, slot: int) -> None:
        self.emitted[slot] = False
        self.prompt[slot] = False
