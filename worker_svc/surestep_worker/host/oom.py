"""Detect kills by the kernel's out-of-memory killer, whose signal looks like any other."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from surestep_common.cgroups import own_groups

_FILES = {1: "memory.oom_control", 2: "memory.events"}  # of a cgroup by its version
_EVERY_S = 1.0
_REMEMBERED = 10  # readings: a process with much memory takes a while to exit


class OomKills:
    """Counts kills on this machine and in this process's cgroup; call `look` regularly."""

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        """`files` have lines `oom_kill N`; missing files are ignored."""
        self._files = _files() if files is None else files
        self._counts: deque[int] = deque([self._count()], maxlen=_REMEMBERED)
        self._looked_at = 0.0

    def look(self, now: float) -> None:
        """Read the counters once a second. `now`: seconds of any monotonic clock. Call it often."""
        if now - self._looked_at >= _EVERY_S:
            self._looked_at = now
            self._counts.append(self._count())

    def explain(self) -> bool:
        """Return whether there was a kill in the last seconds; each explains one death only."""
        count = self._count()
        found = count > self._counts[0]
        if found:
            self._counts.clear()
            self._counts.append(count)
        return found

    def _count(self) -> int:
        return sum(map(_kills, self._files))


def _kills(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _files() -> list[Path]:
    groups = own_groups("memory")
    return [Path("/proc/vmstat"), *(group.folder / _FILES[group.version] for group in groups)]
