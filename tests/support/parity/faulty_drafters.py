"""Drafters that fail now and then: they raise, break their promises, or meet NaN.

Each wraps a drafter that works, and fails by a hash of what it is asked, half done where it can.
Importing this module registers them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn
from zlib import crc32

import torch
from surestep_common.invariants import IntArray
from surestep_kernels.slot_state import SlotState
from surestep_kernels.table import StepOps
from surestep_worker.drafters import DRAFTERS, DraftContext, Drafts
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.head import HeadDrafter, HeadSteps
from surestep_worker.drafters.inputs import DraftInputs
from surestep_worker.drafters.ngram import NgramDrafter
from surestep_worker.drafters.temperature import DraftTemperature
from torch import Tensor

FAILURES: Counter[str] = Counter()  # since the test emptied it


def _unlucky(kind: str, *what: Any) -> bool:
    """One time in five."""
    unlucky = crc32(repr(what).encode()) % 5 == 0
    FAILURES[kind] += unlucky
    return unlucky


class _Broken(Exception):
    """What a drafter raises."""


class _Faulty:
    """Ngram drafts, or a fault: an exception, a wrong id, or too many drafts."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        inner = DRAFTERS.get("ngram")(config, context)
        assert isinstance(inner, NgramDrafter)
        self._inner = inner

    def propose(self, tokens: torch.Tensor, *columns: torch.Tensor) -> Drafts:
        drafts, lengths = self._inner.propose(tokens, *columns), columns[1].tolist()
        if _unlucky("raised", "raise", *lengths):
            raise _Broken
        if _unlucky("wrong id", "id", *lengths):
            return drafts._replace(ids=drafts.ids - 10**6)
        if _unlucky("too many", "many", *lengths):
            return drafts._replace(counts=drafts.counts + 100)
        return drafts


DRAFTERS.register("faulty")(_Faulty)


class _FaultyHead(HeadDrafter):
    """The MTP head, or a fault of any of its parts, in the middle of its work."""

    def on_device(self, ops: StepOps, state: SlotState) -> HeadSteps:
        return _FaultyHeadSteps(self, self._context, ops, state)

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        if _unlucky("observed", slots.tolist(), n_accepted.tolist()):
            raise _Broken
        super().observe(slots, n_drafts, n_accepted)


class _FaultyHeadSteps(HeadSteps):
    def draft(self, rows: DraftInputs, *rest: Any) -> Drafts:
        drafted = super().draft(rows, *rest)
        if _unlucky("raised", "raise", *self._state.known[rows.slot.long()].tolist()):
            raise MemoryError
        return drafted

    def _catch_up(self, slots: Tensor, catch_up: Tensor, *rest: Any) -> None:
        if _unlucky("catch-up", "catch up", catch_up.tolist(), slots.tolist()):
            super()._catch_up(slots, (catch_up + 1) // 2, *rest)
            self._seed[slots] = torch.nan
            raise _Broken
        super()._catch_up(slots, catch_up, *rest)

    def _next(self, slots: Tensor, position: Tensor, *rest: Any) -> Tensor:
        out = super()._next(slots, position, *rest)
        if _unlucky("nan", "nan", *position.tolist()):
            out[0] = torch.nan
        return out


@DRAFTERS.register("faulty-mtp")
def _faulty_mtp(config: SpeculativeConfig, context: DraftContext) -> HeadDrafter:
    temperature = DraftTemperature(context.num_slots, config.draft_temperature)
    return _FaultyHead(context, temperature)


class _Hopeless:
    """Raises whenever it is asked."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        pass

    def propose(self, *columns: torch.Tensor) -> NoReturn:
        FAILURES["raised"] += 1
        raise _Broken


DRAFTERS.register("hopeless")(_Hopeless)
