"""Warnings about system limits that are too low for a server."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from surestep_common.cgroups import SYSTEM, own_groups
from surestep_common.process import clients_within

# Of gateway, scheduler, watchdog and launcher; of each rank with supervisor and standby; more with
# every core.
_TASKS, _TASKS_OF_RANK = 50, 30
_FILES = 1024


def shortages(ranks: int, root: Path = SYSTEM) -> Iterator[str]:
    """Yield a line for each limit that is too low; `root` is where proc and sys are mounted."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FILES:
        yield f"ulimit -n is {files}: at most about {clients_within(files)} clients at once"
    needed = _TASKS + _TASKS_OF_RANK * ranks + (os.cpu_count() or 1)
    for left, limit in _tasks_left(root):
        if left < needed:
            yield (
                f"{left} more processes and threads are allowed ({limit}), of which "
                f"{ranks} ranks need about {needed}"
            )


def _tasks_left(root: Path) -> Iterator[tuple[int, str]]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # which has no limit
        yield soft - _tasks_of_user(root / "proc", os.getuid()), "ulimit -u"
    for group in own_groups("pids", root):
        for folder in group.with_those_around():
            yield from _pids_left(folder)


def _pids_left(group: Path) -> Iterator[tuple[int, str]]:
    try:
        most = (group / "pids.max").read_text().strip()
        now = int((group / "pids.current").read_text())
    except OSError:
        return
    if most != "max":
        yield int(most) - now, "pids of the cgroup"


def _tasks_of_user(proc: Path, uid: int) -> int:
    count = 0
    for process in proc.glob("[0-9]*"):
        try:
            if process.stat().st_uid == uid:
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # it has ended
            continue
    return count
