"""Whether a heartbeat has stood still for longer than it may."""

from __future__ import annotations

from typing import NamedTuple

from surestep_worker.host.heartbeat import Heartbeat, HeartbeatState

POLL_S = 0.05
_LONGEST_GAP_NS = round(4 * POLL_S * 1e9)


class Stall(NamedTuple):
    """A beat that is too old."""

    beat: HeartbeatState
    stood_s: float

    def __str__(self) -> str:
        return f"{self.beat} for {self.stood_s:.1f} s (limit {self.beat.limit_ms / 1000:.1f} s)"


class HeartbeatMonitor:
    """Looks at a heartbeat every POLL_S and counts how long it has seen it stand still.

    Time in which nobody looked hardly counts: when the whole machine stood still, or was too busy
    even for the supervisor, a rank that did not run is no rank that hangs.
    """

    def __init__(self, heartbeat: Heartbeat, now_ns: int) -> None:
        self._heartbeat = heartbeat
        self._looked_ns = now_ns
        self._since_ns = 0
        self._stood_ns = 0

    def check(self, now_ns: int) -> Stall | None:
        """What is late, if anything; `now_ns` by CLOCK_MONOTONIC."""
        beat = self._heartbeat.read()
        elapsed = min(now_ns - self._looked_ns, _LONGEST_GAP_NS)
        self._stood_ns = self._stood_ns + elapsed if beat.since_ns == self._since_ns else 0
        self._since_ns, self._looked_ns = beat.since_ns, now_ns
        late = 0 < beat.limit_ms * 1_000_000 < self._stood_ns
        return Stall(beat, self._stood_ns / 1e9) if late else None
