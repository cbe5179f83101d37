"""Detect that a heartbeat has stalled for longer than its limit."""

from __future__ import annotations

from typing import NamedTuple

from surestep_worker.step.heartbeat import Heartbeat, HeartbeatState

POLL_S = 0.05
_LONGEST_GAP_NS = round(4 * POLL_S * 1e9)


class Stall(NamedTuple):
    """A heartbeat that is overdue."""

    beat: HeartbeatState
    stood_s: float

    def __str__(self) -> str:
        return f"{self.beat} for {self.stood_s:.1f} s (limit {self.beat.limit_ms / 1000:.1f} s)"


class HeartbeatMonitor:
    """Reads a heartbeat every POLL_S and measures how long it has not changed.

    Time in which it was not read hardly counts: if the whole machine was suspended, or too busy
    even for the supervisor, a rank that did not run is not a rank that hangs.
    """

    def __init__(self, heartbeat: Heartbeat, now_ns: int) -> None:
        self._heartbeat = heartbeat
        self._looked_ns = now_ns
        self._since_ns = 0
        self._stood_ns = 0

    def check(self, now_ns: int) -> Stall | None:
        """Return the stall, if there is one; `now_ns` is of CLOCK_MONOTONIC."""
        beat = self._heartbeat.read()
        elapsed = min(now_ns - self._looked_ns, _LONGEST_GAP_NS)
        self._stood_ns = self._stood_ns + elapsed if beat.since_ns == self._since_ns else 0
        self._since_ns, self._looked_ns = beat.since_ns, now_ns
        late = 0 < beat.limit_ms * 1_000_000 < self._stood_ns
        return Stall(beat, self._stood_ns / 1e9) if late else None
