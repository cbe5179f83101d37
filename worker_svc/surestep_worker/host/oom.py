"""Whether the kernel's out-of-memory killer was at work: its signal looks like anybody's."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from surestep_common.cgroups import own_groups

_FILES = {1: "memory.oom_control", 2: "memory.events"}  # of a cgroup by its version
_EVERY_S = 1.0
_REMEMBERED = 10  # looks: a process with much memory takes its time to be gone


class OomKills:
    """Kills on this machine and in this process's cgroup; `look` now and then."""

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        """`files` have lines `oom_kill N`; those that are not there say nothing."""
        self._files = _files() if files is None else files
        self._counts: deque[int] = deque([self._count()], maxlen=_REMEMBERED)
        self._looked_at = 0.0

    def look(self, now: float) -> None:
        """Called often; reads every second. `now` in seconds of any clock that never goes back."""
        if now - self._looked_at >= _EVERY_S:
            self._looked_at = now
            self._counts.append(self._count())

    def explain(self) -> bool:
        """There was one in the last seconds; it explains this death, and not the next one too."""
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
