"""Sampling parameters of every slot, as arrays owned by the features that use them."""

from __future__ import annotations

import torch
from surestep_proto import engine_pb2 as pb

from .bad_words import BadWords
from .bias import TokenBias
from .draw import Draws
from .features import Feature
from .penalties import Penalties
from .stops import StopTokens
from .wants import LogprobWants


class SamplingSlots:
    """One entry per slot. Flags live on the host, so that asking who needs what never waits."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.prompt_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.shaped = torch.zeros(num_slots, dtype=torch.bool)  # needs more than an argmax
        self.stops = StopTokens(num_slots, device)
        self.draws = Draws(num_slots, vocab_size, device)
        self.logprobs = LogprobWants(num_slots)
        self.features: tuple[Feature, ...] = (  # in the order in which they change the logits
            TokenBias(num_slots, vocab_size, device),
            self.stops,
            Penalties(num_slots, device),
            BadWords(num_slots, device),
        )

    def admit(self, slot: int, params: pb.SamplingParams, prompt_len: int) -> None:
        """A request moves into `slot`. `prompt_len` tokens of its history are prompt."""
        self.free(slot)
        self.prompt_len[slot] = prompt_len
        self.logprobs.admit(slot, params)
        self.draws.admit(slot, params)
        for feature in self.features:
            feature.admit(slot, params)
        self.shaped[slot] = bool(self.draws.active[slot]) or any(
            bool(feature.active[slot]) for feature in self.features
        )

    def free(self, slot: int) -> None:
        """The request of `slot` has left. Freeing a free slot is harmless."""
        self.shaped[slot] = False
        self.logprobs.free(slot)
        self.draws.free(slot)
        for feature in self.features:
            feature.free(slot)
