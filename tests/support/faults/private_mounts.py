"""Small file systems that only one server sees: a mount namespace of its own, where that is allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

_MOUNT = "mount -t tmpfs -o size={size} tmpfs {path}"
_FILL = "dd if=/dev/zero of={path}/fill bs=4k status=none 2>/dev/null || true"


@cache
def allowed() -> bool:
    """Whether this user may mount."""
    command = within({Path("/dev/shm"): "64k"}, filled=())
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(
    "not __import__('support.faults.private_mounts', fromlist=['allowed']).allowed()",
    reason="no mounts",
)


def within(sizes: Mapping[Path, str], filled: tuple[Path, ...]) -> list[str]:
    """A command in front of another, which then has a tmpfs of this size in each of these places;
    those that are `filled` have no byte left."""
    lines = ["mount --make-rprivate /"]
    for path, size in sizes.items():
        lines += [f"mkdir -p {path}", _MOUNT.format(size=size, path=path)]
        lines += [_FILL.format(path=path)] * (path in filled)
    return ["unshare", "--mount", "sh", "-c", " && ".join([*lines, 'exec "$@"']), "sh"]


def fill(pid: int, *paths: Path) -> None:
    """Leave no byte, as this process sees these places."""
    for path in paths:
        command = ("nsenter", "-t", str(pid), "--mount", "sh", "-c", _FILL.format(path=path))
        subprocess.run(command, check=True)
