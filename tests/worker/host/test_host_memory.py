"""What is left of memory, as a machine, its cgroups and this process's limits tell it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from surestep_worker.host.host_memory import GIB, OutOfMemory, free_memory, memory_errors

MEMINFO = "MemTotal: 9000000 kB\nMemAvailable: 4000000 kB\nSwapFree: 1000000 kB\n"
STATUS = "Name:\tpython\nVmSize:\t 1000000 kB\nVmData:\t 500000 kB\n"
UNLIMITED_V1 = str((1 << 63) - 4096)


def system(root: Path, cgroups: str, files: Mapping[str, str]) -> Path:
    """A root with proc and sys."""
    everything = {
        "proc/meminfo": MEMINFO,
        "proc/self/status": STATUS,
        "proc/self/cgroup": cgroups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, most: object, used: int, *, version: int, cache: int = 0) -> dict[str, str]:
    prefix = f"{folder}/" if folder else ""
    if version == 2:
        stat = f"anon 5\nactive_file {cache}\ninactive_file 0\n"
        names = "memory.max", "memory.current"
    else:
        stat = f"cache 7\ntotal_active_file 0\ntotal_inactive_file {cache}\n"
        names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    values = dict(zip(names, (str(most), str(used)), strict=True))
    return {prefix + name: text for name, text in {**values, "memory.stat": stat}.items()}


def test_the_machine_is_the_limit_where_there_is_no_other(tmp_path: Path) -> None:
    left = free_memory(system(tmp_path, "0::/\n", {}))
    assert left == (5_000_000 * 1024, "the machine's memory")


@pytest.mark.parametrize("cache", [0, GIB // 4])
def test_version_2_counts_what_can_be_dropped_as_free(tmp_path: Path, cache: int) -> None:
    files = group("a/b", GIB, GIB // 2, version=2, cache=cache)
    left = free_memory(system(tmp_path, "0::/a/b\n", files))
    assert left == (GIB // 2 + cache, "the memory of the cgroup")
    assert str(left) == f"{(GIB // 2 + cache) / GIB:.2f} GiB are left of the memory of the cgroup"


def test_cgroups_around_it_count_as_well(tmp_path: Path) -> None:
    files = group("a/b", "max", 0, version=2) | group("a", GIB, GIB - 4096, version=2)
    assert free_memory(system(tmp_path, "0::/a/b\n", files)).nbytes == 4096


def test_a_path_of_the_host_means_nothing_inside_a_container(tmp_path: Path) -> None:
    files = group("", 2 * GIB, GIB, version=2)
    assert free_memory(system(tmp_path, "0::/docker/0123/deeper\n", files)).nbytes == GIB


def test_version_1(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n5:cpu,memory:/job\n0::/\n"
    files = group("memory/job", GIB, GIB // 4, version=1, cache=1024)
    files |= group("memory", UNLIMITED_V1, 5 * GIB, version=1)
    assert free_memory(system(tmp_path, lines, files)).nbytes == GIB * 3 // 4 + 1024


def test_a_cgroup_that_uses_more_than_it_may_has_nothing_left(tmp_path: Path) -> None:
    files = group("a", GIB, 2 * GIB, version=2)
    assert free_memory(system(tmp_path, "0::/a\n", files)).nbytes == 0


@pytest.mark.parametrize(
    ("limit", "name", "used_kb"),
    [(resource.RLIMIT_AS, "ulimit -v", 1_000_000), (resource.RLIMIT_DATA, "ulimit -d", 500_000)],
)
def test_limits_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, name: str, used_kb: int
) -> None:
    set_limits = {limit: (2 * GIB, resource.RLIM_INFINITY)}
    free = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: set_limits.get(which, free))
    assert free_memory(system(tmp_path, "0::/\n", {})) == (2 * GIB - 1024 * used_kb, name)


def test_a_system_that_tells_nothing_has_no_limits(tmp_path: Path) -> None:
    assert free_memory(tmp_path).nbytes >= 1 << 60


def test_this_machine_has_memory() -> None:
    assert free_memory().nbytes > 0


def raise_(error: Exception) -> None:
    raise error


def import_something() -> None:
    try:
        raise ImportError("x.so: failed to map segment from shared object")
    except ImportError as error:
        raise ImportError("\n\nplease read this") from error


SHORTAGES: dict[str, Callable[[], object]] = {
    "python": lambda: raise_(MemoryError()),
    "system": lambda: raise_(OSError(errno.ENOMEM, "Cannot allocate memory")),
    "torch": lambda: torch.empty(1 << 60, dtype=torch.uint8),
    "gpu": lambda: raise_(torch.OutOfMemoryError("CUDA out of memory. Tried ...")),
    "linker": import_something,
}


@pytest.mark.parametrize("who", SHORTAGES)
def test_whoever_finds_memory_short_is_understood(who: str) -> None:
    with pytest.raises(OutOfMemory, match=r"^out of memory: .+ GiB are left of "), memory_errors():
        SHORTAGES[who]()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "no"), RuntimeError("x"), ImportError("y")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_errors():
        raise error
    assert raised.value is error
