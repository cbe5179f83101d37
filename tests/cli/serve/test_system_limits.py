"""Limits of the system that are too low for a server."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from surestep_cli.serve.system_limits import shortages

FREE = resource.RLIM_INFINITY, resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Those of the process; others are none. The machine has 4 cores."""
    chosen: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(resource, "getrlimit", lambda which: chosen.get(which, FREE))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return chosen


def system(root: Path, cgroups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nothing_is_said_where_nothing_is_short(tmp_path: Path, limits: object) -> None:
    root = system(tmp_path, "0::/a\n", a__pids_max="max", a__pids_current="7")
    assert list(shortages(2, root)) == []


@pytest.mark.parametrize(("files", "clients"), [(256, 128), (64, 16), (32, 8)])
def test_files(
    tmp_path: Path, limits: dict[int, tuple[int, int]], files: int, clients: int
) -> None:
    limits[resource.RLIMIT_NOFILE] = files, files
    root = system(tmp_path, "0::/\n")
    assert list(shortages(1, root)) == [
        f"ulimit -n is {files}: at most about {clients} clients at once"
    ]


@pytest.mark.parametrize(
    ("cgroups", "folder"), [("0::/a/b\n", "a"), ("8:pids:/a/b\n0::/\n", "pids__a")]
)
def test_processes_of_a_cgroup(tmp_path: Path, limits: object, cgroups: str, folder: str) -> None:
    files = {f"{folder}__pids_max": "100", f"{folder}__pids_current": "30"}
    (line,) = shortages(1, system(tmp_path, cgroups, **files))
    assert line == (
        "70 more processes and threads are allowed (pids of the cgroup), of which "
        "1 ranks need about 84"
    )


def test_processes_of_a_user(
    tmp_path: Path, limits: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits[resource.RLIMIT_NPROC] = 60, 60
    root = system(tmp_path, "0::/\n")
    for pid in ("11", "12"):
        for thread in range(5):
            (root / "proc" / pid / "task" / str(thread)).mkdir(parents=True)
    owner = (root / "proc/11").stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner or 1)
    lines = list(shortages(1, root))
    taken = 10 if owner else 0  # the superuser's are nobody else's
    assert [line.partition(" ")[0] for line in lines] == [str(60 - taken)]
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert list(shortages(1, root)) == []
