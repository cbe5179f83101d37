"""Drafting with the model's own multi-token prediction head, used again for every further draft.

The head's row for position i takes the model's hidden state at i and token i + 1. Hidden states of
all positions lie in the KV pages, so positions that were never drafted from can be caught up with
at any time. Rows of drafts themselves are written too, from the head's own output, and overwritten
when the next step catches up with what was accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from surestep_kernels.slot_state import SlotState
from surestep_kernels.step_ops import StepOps

from surestep_worker.models.mtp import MtpHead
from surestep_worker.plan import IntArray

from .base import Target
from .temperature import DraftTemperature, FloatArray

if TYPE_CHECKING:
    from surestep_worker.device.mtp import DeviceMtp
    from surestep_worker.parts import Parts


class MtpDrafter:
    """The head, and how much flatter or sharper than the requests' its draws are."""

    def __init__(self, target: Target, temperature: DraftTemperature) -> None:
        assert target.model.mtp is not None, "the model was loaded without its MTP head"
        self.head: MtpHead = target.model.mtp
        self._sampling, self._temperature = target.sampling, temperature

    def on_device(self, parts: Parts, ops: StepOps, state: SlotState) -> DeviceMtp:
        """What drafts, between the slots of a device and the ops of a step."""
        from surestep_worker.device.mtp import DeviceMtp

        return DeviceMtp(self, parts, ops, state)

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """See KeepsState."""
        random = self._sampling.draws(slots)
        if random.any():
            self._temperature.observe(slots[random], n_drafts[random], n_accepted[random])

    def factors(self, slots: IntArray) -> FloatArray:
        """Divisors [R] of the logits; greedy requests have no use for any."""
        factors = np.ones(len(slots), dtype=np.float32)
        random = self._sampling.draws(slots)
        if random.any():
            factors[random] = self._temperature.choose(slots[random])
        return factors
