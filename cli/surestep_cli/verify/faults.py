"""Faults for workers in mid-stream, limited to processes that this command has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from surestep_common.errors import Unavailable

# From the name to the signal. A stopped worker does not end: it hangs.
FAULTS: Mapping[str, signal.Signals] = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
_FIRST = 1  # the process that is everybody's ancestor


class WorkerRank(NamedTuple):
    """The process of a worker rank."""

    scheduler: str
    rank: int
    pid: int


class ReportedIncident(NamedTuple):
    """A lost epoch as the server reports it."""

    cause: str
    reason: str
    detect_s: float
    recover_s: float
    num_replayed_requests: int


def ranks_of(status: Mapping[str, Any]) -> list[WorkerRank]:
    """Return the running workers of the /status document."""
    return [
        WorkerRank(scheduler["url"], supervisor["rank"], supervisor["rank_pid"])
        for scheduler in status["schedulers"]
        if scheduler["status"] is not None
        for supervisor in scheduler["status"]["supervisors"]
        if supervisor["rank_pid"] and supervisor["rank_state"] == "READY"
    ]


def epoch_of(status: Mapping[str, Any]) -> int:
    """Return the highest epoch; 0 where none is reported."""
    known = [each["status"]["epoch"] for each in status["schedulers"] if each["status"]]
    return max(map(int, known), default=0)


def incidents_since(status: Mapping[str, Any], epoch: int) -> list[ReportedIncident]:
    """Return the incidents that ended this epoch or a later one, the newest first."""
    return [
        ReportedIncident(**{name: incident[name] for name in ReportedIncident._fields})
        for scheduler in status["schedulers"]
        if scheduler["status"] is not None
        for incident in scheduler["status"]["incidents"]
        if int(incident["epoch"]) >= epoch
    ]


def strike(rank: WorkerRank, number: signal.Signals, ancestor: int) -> None:
    """Send the signal. Raise Unavailable if the process is not below `ancestor`, or is gone."""
    if not descends(rank.pid, ancestor):
        raise Unavailable(f"worker {rank.pid} is no process that this command has started")
    try:
        os.kill(rank.pid, number)
    except ProcessLookupError:
        raise Unavailable(f"worker {rank.pid} had ended by itself") from None


def descends(pid: int, ancestor: int) -> bool:
    """Return whether a process is a descendant of another one (Linux)."""
    while pid > _FIRST and pid != ancestor:
        pid = _parent(pid)
    return pid == ancestor


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
