"""The control groups (cgroups) of this process, in both versions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SYSTEM = Path("/")  # where proc and sys are mounted


class Group(NamedTuple):
    """A group in one of the mounted hierarchies."""

    version: int
    tree: Path  # where the hierarchy is mounted
    inner: Path  # the group, from there

    @property
    def folder(self) -> Path:
        """Folder with the files of the group."""
        return self.tree / self.inner

    def with_those_around(self) -> list[Path]:
        """Return the folders of this group and of all that it is in: their limits hold as well."""
        return [self.tree / part for part in (self.inner, *self.inner.parents)]


def own_groups(controller: str, root: Path = SYSTEM) -> list[Group]:
    """Return where the files of a controller ("memory", "pids") may be, as far as known.

    Inside a container the groups may be named as the host names them, and then there is nothing.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount, groups = root / "sys/fs/cgroup", []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        if not controllers:
            groups += [Group(2, tree, inner) for tree in (mount, mount / "unified")]
        elif controller in controllers.split(","):
            groups.append(Group(1, mount / controller, inner))
    return groups
