"""The memory this process may still use: of the machine, its cgroups and its own limits."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from surestep_common.cgroups import SYSTEM, own_groups
from surestep_common.errors import InvalidRequest

GIB = 1 << 30
_UNLIMITED = 1 << 60  # cgroups without a limit report about 2^63
_FILES = {  # of a cgroup, by version: limit, usage, and the prefix of names in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_PHRASES = ("allocate memory", "failed to map segment")  # torch's allocator, dynamic linker


class FreeMemory(NamedTuple):
    """Free bytes, and the limit that leaves them."""

    nbytes: int
    limit: str

    def __str__(self) -> str:
        return f"{self.nbytes / GIB:.2f} GiB are left of {self.limit}"


class OutOfMemory(InvalidRequest):
    """A setting or a model does not fit into the available memory."""


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turn out-of-memory errors of Python, torch and the system into OutOfMemory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        said = next(filter(None, map(_about_memory, _causes(error))), None)
        if said is None:
            raise
        raise OutOfMemory(f"out of memory: {said}; {free_memory()}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _about_memory(error: BaseException) -> str | None:
    """Return the first line of an error that means that memory is short, else None."""
    first = str(error).strip().partition("\n")[0]
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    short = isinstance(error, OSError) and error.errno == errno.ENOMEM
    said = any(phrase in str(error) for phrase in _PHRASES)
    return (first or type(error).__name__) if named or short or said else None


def free_memory(root: Path = SYSTEM) -> FreeMemory:
    """Return the least that any limit leaves; `root` is where proc and sys are mounted.

    A limit that the system does not report counts as unlimited.
    """
    found = [*_machine(root / "proc"), *_cgroups(root), *_own_limits(root / "proc")]
    return min(found, default=FreeMemory(_UNLIMITED, "an unknown amount of memory"))


def _machine(proc: Path) -> Iterator[FreeMemory]:
    about = _table(proc / "meminfo")
    if "MemAvailable:" in about:
        free = about["MemAvailable:"] + about.get("SwapFree:", 0)
        yield FreeMemory(1024 * free, "the machine's memory")


def _own_limits(proc: Path) -> Iterator[FreeMemory]:
    used = _table(proc / "self" / "status")
    for limit, field, name in (
        (resource.RLIMIT_AS, "VmSize:", "ulimit -v"),
        (resource.RLIMIT_DATA, "VmData:", "ulimit -d"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield FreeMemory(max(soft - 1024 * used.get(field, 0), 0), name)


def _cgroups(root: Path) -> Iterator[FreeMemory]:
    """Yield the free memory of this process's cgroup and of its ancestors, in both versions."""
    for group in own_groups("memory", root):
        for folder in group.with_those_around():
            yield from _cgroup(folder, *_FILES[group.version])


def _cgroup(group: Path, limit_file: str, used_file: str, prefix: str) -> Iterator[FreeMemory]:
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / used_file).read_text())
        about = _table(group / "memory.stat")
    except OSError:
        return
    if limit == "max" or int(limit) >= _UNLIMITED:
        return
    cache = sum(about.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    yield FreeMemory(max(int(limit) - used + cache, 0), "the memory of the cgroup")


def _table(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
