"""Heartbeats: what is written is read by another mapping, and what stands still is late."""

from __future__ import annotations

import os
import time

import pytest
from surestep_kernels.compilations import Compilations
from surestep_proto import supervisor_pb2 as pb
from surestep_worker.host import shared_memory as memory
from surestep_worker.process.heartbeat_monitor import POLL_S, HeartbeatMonitor, Stall
from surestep_worker.step.heartbeat import SIZE, Heartbeat

IDLE_S = 3.0
MS = 1_000_000


class Clock:
    """Looks at a heartbeat at moments of its own."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.now_ns = time.monotonic_ns()
        self._monitor = HeartbeatMonitor(heartbeat, self.now_ns)

    def look_after(self, seconds: float) -> Stall | None:
        self.now_ns += round(seconds * 1e9)
        return self._monitor.check(self.now_ns)

    def look_for(self, seconds: float) -> Stall | None:
        """Every POLL_S."""
        for _ in range(round(seconds / POLL_S)):
            if late := self.look_after(POLL_S):
                return late
        return None


def shared() -> tuple[Heartbeat, Heartbeat]:
    fd = memory.create("test", SIZE)
    ends = Heartbeat.shared(fd, IDLE_S, 60), Heartbeat.shared(fd, IDLE_S, 60)
    os.close(fd)
    return ends


def test_one_side_reads_what_the_other_writes() -> None:
    rank, supervisor = shared()
    assert supervisor.read() == (0, 0, pb.PHASE_UNSPECIFIED, 0, 0)
    before = time.monotonic_ns()
    rank.begin(epoch=7, step=9, budget_ms=4000)
    rank.enter(pb.FORWARD)
    beat = supervisor.read()
    assert (beat.epoch, beat.step, beat.phase, beat.limit_ms) == (7, 9, pb.FORWARD, 5200)
    assert before <= beat.since_ns <= time.monotonic_ns()
    assert str(beat) == "FORWARD of step 9 in epoch 7"
    rank.idle()
    assert (supervisor.read().phase, supervisor.read().limit_ms) == (pb.IDLE, 3000)


def test_a_step_is_late_when_it_has_stood_for_its_limit() -> None:
    heartbeat = Heartbeat(bytearray(SIZE), IDLE_S, 60)
    clock = Clock(heartbeat)
    heartbeat.begin(epoch=1, step=1, budget_ms=1000)
    assert clock.look_for(1.45) is None
    late = clock.look_for(0.2)
    assert late is not None
    assert str(late) == "PREPARING of step 1 in epoch 1 for 1.5 s (limit 1.4 s)"


def test_a_phase_does_not_prolong_a_step() -> None:
    heartbeat = Heartbeat(bytearray(SIZE), IDLE_S, 60)
    clock = Clock(heartbeat)
    heartbeat.begin(epoch=1, step=1, budget_ms=1000)
    assert clock.look_for(1.0) is None
    heartbeat.enter(pb.FORWARD)
    assert clock.look_for(0.6) is not None


def test_signs_of_life_are_never_late() -> None:
    heartbeat = Heartbeat(bytearray(SIZE), 0.2, 60)
    clock = Clock(heartbeat)
    for _ in range(20):
        heartbeat.idle()
        assert clock.look_for(0.2) is None
    assert clock.look_for(0.1) is not None


def test_a_step_without_budget_is_never_late() -> None:
    heartbeat = Heartbeat(bytearray(SIZE), IDLE_S, 60)
    clock = Clock(heartbeat)
    heartbeat.begin(epoch=1, step=1, budget_ms=0)
    assert clock.look_for(100) is None


def test_time_in_which_nobody_looked_hardly_counts() -> None:
    heartbeat = Heartbeat(bytearray(SIZE), IDLE_S, 60)
    clock = Clock(heartbeat)
    heartbeat.idle()
    assert clock.look_after(POLL_S) is None
    assert clock.look_after(1000.0) is None, "the supervisor stood still itself"
    assert clock.look_for(IDLE_S) is not None


def test_what_is_compiled_while_serving_is_counted_and_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step's limit rests meanwhile, and begins again."""
    compilations, heartbeat = Compilations(), Heartbeat(bytearray(SIZE), 3, 60)
    compilations.begin()
    compilations.end("early")
    assert compilations.num_late == 0
    compilations.serve(heartbeat)
    heartbeat.begin(epoch=1, step=2, budget_ms=1000)
    heartbeat.enter(pb.FORWARD)
    began = heartbeat.read()
    compilations.begin()
    assert heartbeat.read()[:4] == (1, 2, pb.COMPILING, 60_000)
    compilations.end("late_kernel")
    assert heartbeat.read()[:4] == began[:4]
    assert heartbeat.read().since_ns > began.since_ns
    assert compilations.num_late == 1
    assert "late_kernel was compiled while serving" in caplog.text
