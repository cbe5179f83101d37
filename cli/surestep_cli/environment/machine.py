"""Facts of the machine: system, processor, memory, limits of the container, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from surestep_common.cgroups import SYSTEM, own_groups
from surestep_common.process import memory_bytes

_GIB = 1 << 30
_UNLIMITED = 1 << 60  # cgroups without a limit report about 2^63
_NO_LIMIT = "no limit"
_MEMORY = {1: ("memory.limit_in_bytes",), 2: ("memory.max",)}  # by the version of cgroups
_CPU = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # quota and period
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,compute_cap,driver_version",
    "--format=csv,noheader",
)
_TIMEOUT_S = 20.0  # of a driver that is asked for its GPUs


def system_facts() -> dict[str, str]:
    """Return the operating system and its C library."""
    release: dict[str, str] = {}
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
    return {
        "os": release.get("PRETTY_NAME", platform.system()),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
    }


def cpu_facts(root: Path = SYSTEM) -> dict[str, str]:
    """Return the processor, and the cores this process may run on; `root` has proc and sys."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    cores = min((quota / period for quota, period in _limits("cpu", _CPU, root)), default=None)
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "machine": platform.machine(),
        "model": next(models, "unknown"),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "cgroup": _NO_LIMIT if cores is None else f"{cores:.1f} cores",
    }


def memory_facts(root: Path = SYSTEM) -> dict[str, str]:
    """Return the memory there is, the part that is free, and the limit of the cgroup."""
    rows = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    free = next((int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"), 0)
    limit = min((size for (size,) in _limits("memory", _MEMORY, root)), default=_UNLIMITED)
    return {
        "for this process": f"{memory_bytes() / _GIB:.1f} GiB",
        "available on the machine": f"{free / _GIB:.1f} GiB",
        "cgroup": f"{limit / _GIB:.1f} GiB" if limit < _UNLIMITED else _NO_LIMIT,
    }


def gpus() -> list[str]:
    """Return name, memory, compute capability and driver of each NVIDIA GPU, as its driver does."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 - the machine's own tool
            _NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi fails: {error}"]
    return done.stdout.splitlines()


def _limits(
    controller: str, files: Mapping[int, tuple[str, ...]], root: Path
) -> Iterator[list[int]]:
    """Yield the numbers in the files of each limit, of this process's cgroup and those around."""
    for group in own_groups(controller, root):
        for folder in group.with_those_around():
            words = " ".join(_text(folder / name) for name in files[group.version]).split()
            if words and all(word.isdecimal() for word in words):
                yield list(map(int, words))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
