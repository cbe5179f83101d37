"""Sampling and verification: from logits to the tokens that a step emits."""

from __future__ import annotations

from .logprobs import Logprobs, emitted_logprobs, token_logprobs
from .sampler import Sampled, sample
from .slots import SamplingSlots
from .verify import Verdict, verify

__all__ = [
    "Logprobs",
    "Sampled",
    "SamplingSlots",
    "Verdict",
    "emitted_logprobs",
    "sample",
    "token_logprobs",
    "verify",
]
