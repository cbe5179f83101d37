"""Ends of a supervisor's rank processes, and the time until they were replaced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from surestep_proto import supervisor_pb2 as pb

from surestep_worker.step.heartbeat import HeartbeatState

from .rank_process import ExitReason

_KEPT = 20


@dataclass(slots=True)
class Exit:
    """The end of one rank process. Times are of CLOCK_MONOTONIC."""

    pid: int
    exit_reason: ExitReason
    last: HeartbeatState
    last_age_s: float
    at: float
    replaced_s: float = 0.0  # until the next rank was ready; 0 = not yet


class ExitHistory:
    """The latest exits of rank processes."""

    def __init__(self) -> None:
        self._exits: deque[Exit] = deque(maxlen=_KEPT)
        self.count = 0
        self.failures = 0  # consecutive ones before the rank was ready

    def record(
        self, pid: int, exit_reason: ExitReason, last: HeartbeatState, *, was_ready: bool
    ) -> None:
        """Record that a rank has just ended."""
        self.count += 1
        self.failures = 0 if was_ready else self.failures + 1
        self._exits.appendleft(Exit(pid, exit_reason, last, last.age_s(), time.monotonic()))

    def record_ready(self) -> float:
        """Record that a rank is ready; return the seconds since the previous one ended, or 0."""
        self.failures = 0
        now = time.monotonic()
        for exit_ in self._exits:
            exit_.replaced_s = exit_.replaced_s or now - exit_.at
        return self._exits[0].replaced_s if self._exits else 0.0

    @property
    def last(self) -> str:
        """The latest exit in one line; empty = none."""
        if not self._exits:
            return ""
        return f"pid {self._exits[0].pid}: {self._exits[0].exit_reason.reason}"

    def reports(self) -> Iterator[pb.RankExit]:
        """Yield the recorded exits, newest first."""
        now = time.monotonic()
        for exit_ in self._exits:
            yield pb.RankExit(
                pid=exit_.pid,
                cause=exit_.exit_reason.cause,
                reason=exit_.exit_reason.reason,
                last=heartbeat_proto(exit_.last, exit_.last_age_s),
                age_s=now - exit_.at,
                replaced_s=exit_.replaced_s,
                signal=exit_.exit_reason.signal,
                outside=exit_.exit_reason.outside,
            )


def heartbeat_proto(beat: HeartbeatState, age_s: float) -> pb.Heartbeat:
    return pb.Heartbeat(epoch=beat.epoch, step=beat.step, phase=beat.phase, age_s=age_s)
