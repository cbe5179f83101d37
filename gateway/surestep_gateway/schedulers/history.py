"""A scheduler's statistics of the last minutes, one sample per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pydantic import BaseModel
from surestep_proto.scheduler_pb2 import SchedulerStats

_KEPT = 181  # samples, one a second: three minutes between the first and the last
_OUTAGES = 20


class HistoryView(BaseModel):
    """Parallel columns, oldest first; one element per interval between two samples."""

    age_s: list[float]  # of its end
    output_tok_s: list[float]
    prompt_tok_s: list[float]
    steps_s: list[float]
    running: list[int]  # at its end, as the next two
    waiting: list[int]
    kv_usage: list[float]  # 0 to 1
    accepted: list[float | None]  # share of the drafts, 0 to 1; None: there were none


class OutageView(BaseModel):
    """An interval in which the scheduler did not respond to the gateway."""

    age_s: float  # of its beginning
    seconds: float | None  # None: it has not ended


class _Sample(NamedTuple):
    """Counters and gauges at one moment."""

    at: float
    output: int
    prompt: int
    steps: int
    drafts: int
    accepted: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(slots=True)
class _Outage:
    began: float
    ended: float | None = None


class History:
    """The recent samples of one scheduler, fed once a second. Times `now` are on one clock."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)
        self._outages: deque[_Outage] = deque(maxlen=_OUTAGES)  # newest first

    def add(self, stats: SchedulerStats, now: float) -> None:
        """Record a reply of the scheduler."""
        if self._is_out:
            self._outages[0].ended = now
        elif self._samples and stats.num_steps < self._samples[-1].steps:
            # Another process, which took over between two questions.
            self._outages.appendleft(_Outage(self._samples[-1].at, now))
        self._samples.append(
            _Sample(
                now,
                stats.generation_tokens,
                stats.prompt_tokens,
                stats.num_steps,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
                stats.num_running,
                stats.num_waiting,
                stats.num_blocks_used / max(1, stats.num_blocks_total),
            )
        )

    def missed(self, now: float) -> None:
        """Record a missing reply. Before the first reply that is no outage."""
        if self._samples and not self._is_out:
            self._outages.appendleft(_Outage(now))

    @property
    def _is_out(self) -> bool:
        return bool(self._outages) and self._outages[0].ended is None

    def view(self, now: float) -> HistoryView:
        """Return rates between samples; a counter that fell belongs to a new process."""
        pairs = list(pairwise(self._samples))

        def rates(counter: Callable[[_Sample], int]) -> list[float]:
            return [
                round(max(0, counter(b) - counter(a)) / max(b.at - a.at, 1e-3), 2) for a, b in pairs
            ]

        return HistoryView(
            age_s=[round(now - b.at, 2) for _, b in pairs],
            output_tok_s=rates(lambda s: s.output),
            prompt_tok_s=rates(lambda s: s.prompt),
            steps_s=rates(lambda s: s.steps),
            running=[b.running for _, b in pairs],
            waiting=[b.waiting for _, b in pairs],
            kv_usage=[round(b.kv_usage, 4) for _, b in pairs],
            accepted=[_share(b.accepted - a.accepted, b.drafts - a.drafts) for a, b in pairs],
        )

    def outages(self, now: float) -> list[OutageView]:
        """Return the latest outages, newest first."""
        return [
            OutageView(
                age_s=round(now - one.began, 2),
                seconds=None if one.ended is None else round(one.ended - one.began, 2),
            )
            for one in self._outages
        ]


def _share(accepted: int, drafts: int) -> float | None:
    return round(max(0, accepted) / drafts, 4) if drafts > 0 else None
