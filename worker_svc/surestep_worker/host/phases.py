"""The phases of a step: reported to the supervisor by the heartbeat, and timed."""

from __future__ import annotations

import time
from collections import defaultdict

from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_worker.host.heartbeat import Heartbeat


class Phases:
    """Times one step after the other. Not thread-safe: every call comes from the step thread."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self.begin()

    def begin(self) -> None:
        """Start timing a step, which is being prepared."""
        self._spent_ns = defaultdict[pb.Phase, int](int)
        self._phase, self._since_ns = pb.PREPARING, time.perf_counter_ns()

    def enter(self, phase: pb.Phase) -> None:
        self._lap()
        self._phase = phase
        self._heartbeat.enter(phase)

    def timings(self) -> worker_pb2.Timings:
        """Return the timings of the step so far, valid where launches are synchronous."""
        self._lap()
        draft_ns = self._spent_ns[pb.DRAFTING]
        return worker_pb2.Timings(
            draft_us=draft_ns // 1000,
            prepare_us=(self._spent_ns[pb.PREPARING] + draft_ns) // 1000,
            forward_us=self._spent_ns[pb.FORWARD] // 1000,
            sample_us=self._spent_ns[pb.SAMPLING] // 1000,
        )

    def _lap(self) -> None:
        now = time.perf_counter_ns()
        self._spent_ns[self._phase] += now - self._since_ns
        self._since_ns = now
