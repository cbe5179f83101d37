"""The heartbeat of a rank: words of shared memory that its step thread writes in every phase.

The supervisor reads them without the rank's help. Each word is 8 aligned bytes and written at once;
`since` is written before and read after the others, so that a word of a newer heartbeat is never
seen with the age of an older one. The phases of a step are timed on the way.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from typing import NamedTuple, cast

from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

SIZE = 5 * 8
_EPOCH, _STEP, _PHASE, _LIMIT, _SINCE = range(5)
_STEP_FACTOR, _STEP_MARGIN_MS = 1.25, 200  # the scheduler, with the same budget, should act first


class HeartbeatState(NamedTuple):
    """State of a rank."""

    epoch: int  # of the newest plan; 0 = none
    step: int  # of the newest plan
    phase: pb.Phase
    limit_ms: int  # overdue this long after `since_ns`; 0 = never
    since_ns: int  # CLOCK_MONOTONIC

    def age_s(self) -> float:
        """Return the seconds since then; 0 before the first heartbeat."""
        return (time.monotonic_ns() - self.since_ns) / 1e9 if self.since_ns else 0.0

    def __str__(self) -> str:
        name = pb.Phase.Name(self.phase)
        return f"{name} of step {self.step} in epoch {self.epoch}" if self.epoch else name


class Heartbeat:
    """Writer and reader of a heartbeat: one process writes, another one reads."""

    def __init__(self, memory: mmap.mmap | bytearray, idle_s: float, load_s: float) -> None:
        """Limits in seconds: between two ticks of an idle rank, and of loading without progress."""
        self._words = memoryview(memory).cast("Q")
        self._idle_ms, self._load_ms = round(1000 * idle_s), round(1000 * load_s)
        self._interrupted = (pb.PHASE_UNSPECIFIED, 0)  # by the compiler: phase and limit

    @classmethod
    def shared(cls, fd: int, idle_s: float, load_s: float) -> Heartbeat:
        """Return the heartbeat in a memfd of SIZE bytes, which may be closed then."""
        return cls(mmap.mmap(fd, SIZE), idle_s, load_s)

    @classmethod
    def local(cls) -> Heartbeat:
        """Return a heartbeat in private memory, which is not monitored."""
        return cls(bytearray(SIZE), 0, 0)

    def expect(self, limit_s: float) -> None:
        """Write the state before the rank's own first one, which is due within `limit_s`."""
        self._since_now(pb.PHASE_UNSPECIFIED, round(1000 * limit_s))

    def progress(self, phase: pb.Phase, limit_s: float | None = None) -> None:
        """Record progress of LOADING or WARMING_UP; the next is due within the limit of loading, or
        another one."""
        self._since_now(phase, self._load_ms if limit_s is None else round(1000 * limit_s))

    def idle(self) -> None:
        """Record that the rank waits for a plan; to be repeated regularly."""
        self._since_now(pb.IDLE, self._idle_ms)

    def begin(self, epoch: int, step: int, budget_ms: int) -> None:
        """Start a step, whose limit is slightly above the scheduler's budget (0 = no limit)."""
        limit = round(_STEP_FACTOR * budget_ms) + _STEP_MARGIN_MS if budget_ms else 0
        self._since_now(pb.PREPARING, limit)
        self._words[_STEP] = step
        self._words[_EPOCH] = epoch

    def enter(self, phase: pb.Phase) -> None:
        """Enter the next phase of the step, under the same limit."""
        self._words[_PHASE] = phase

    def compiling(self) -> None:
        """Have the limit of the step rest, as a kernel is compiled within it."""
        state = self.read()
        self._interrupted = state.phase, state.limit_ms
        self._since_now(pb.COMPILING, self._load_ms)

    def compiled(self) -> None:
        """Go on where the compiler interrupted, with all of the step's time again."""
        self._since_now(*self._interrupted)

    def read(self) -> HeartbeatState:
        """Return the newest state."""
        words = self._words
        epoch, step, phase, limit = words[_EPOCH], words[_STEP], words[_PHASE], words[_LIMIT]
        return HeartbeatState(epoch, step, cast("pb.Phase", phase), limit, words[_SINCE])

    def _since_now(self, phase: pb.Phase, limit_ms: int) -> None:
        words = self._words
        words[_SINCE] = time.monotonic_ns()
        words[_LIMIT] = limit_ms
        words[_PHASE] = phase


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
