"""The latest steps one by one, for the status page: what each did, when, and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from surestep_common.invariants import DECODE, POOL, VERIFY, IntArray

from surestep_scheduler.core.messages import Outcome

_KEPT = 512


class StepRecord(NamedTuple):
    """Record of a step. Times are on the scheduler's clock, in seconds."""

    epoch: int
    step: int
    ended_at: float
    took_s: float
    prompt_rows: int
    decode_rows: int
    verify_rows: int
    num_emitted: int  # tokens
    num_accepted: int  # of them, drafts


class RecentSteps:
    """The newest steps, whatever their epoch."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_KEPT)

    def add(self, outcome: Outcome, mode: IntArray, now: float, took_s: float) -> None:
        """Record a step whose rows had these modes [R]."""
        rows = np.bincount(mode, minlength=POOL + 1)
        decoding, verifying = int(rows[DECODE]), int(rows[VERIFY])
        self._steps.append(
            StepRecord(
                *(outcome.epoch, outcome.step, now, took_s),
                *(len(mode) - decoding - verifying, decoding, verifying),
                *(len(outcome.token_ids), int(outcome.rows.n_drafts_emitted.sum())),
            )
        )

    def latest(self, count: int) -> Sequence[StepRecord]:
        """Return at most `count` steps, oldest first."""
        return list(islice(reversed(self._steps), count))[::-1]
