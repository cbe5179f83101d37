"""Vectors of prompts: the mean of hidden states, the same bits however a prompt is cut.

Sums of floating-point numbers depend on their order, and the order on the chunks of a prompt and on
what a device does. So hidden states are summed as integers: every element is rounded once, to a
multiple of a power of two that the model's weights fix, and integers may be added in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surestep_worker.cache.kv_cache import zero_pages
from surestep_worker.configs.rope import MAX_POSITION

_SUM_BITS = 62  # of a signed sum; one is spare
_LEAST_BOUND = -64  # as a power of two: smaller numbers are as good as none


class PoolingSums:
    """Sums of hidden states by slot; the line behind the slots' is the NULL slot's."""

    def __init__(
        self, num_slots: int, hidden_size: int, bound: float, device: torch.device
    ) -> None:
        """`bound` is above the magnitude of every element of a hidden state of the model."""
        exponent = math.frexp(bound)[1] if math.isfinite(bound) else 0
        bits = _SUM_BITS - MAX_POSITION.bit_length() - max(exponent, _LEAST_BOUND)
        self._scale = math.ldexp(1.0, bits)
        # The last column counts tokens that had an element that was no number.
        shape = num_slots + 1, hidden_size + 1
        self._sums = zero_pages(shape, torch.int64, device.type)

    def admit(self, slot: int) -> None:
        """A prompt begins."""
        self._sums[slot] = 0

    def add(self, slot: Tensor, hidden: Tensor) -> None:
        """Add the hidden states [Q, H] of tokens to the sums of their slots i64[Q]."""
        finite = hidden.isfinite()
        terms = (hidden.float() * self._scale).where(finite, 0).round_().long()
        spoilt = (~finite).any(dim=1, keepdim=True)
        self._sums.index_add_(0, slot, torch.cat((terms, spoilt), dim=1))

    def mean(self, slot: Tensor, num_tokens: Tensor) -> Tensor:
        """Means f32[K, H] of slots i64[K] that have so many tokens i64[K]; NaN where one had."""
        sums = self._sums[slot]
        mean = sums[:, :-1].double() / (num_tokens.double() * self._scale).unsqueeze(1)
        return mean.masked_fill_(sums[:, -1:] > 0, math.nan).float()
