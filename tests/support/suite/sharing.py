"""What workers of pytest-xdist share: tests, of which those of one server, or of one model, stay
together, and what takes long to make."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from xdist.scheduler import LoadScopeScheduling

_Made = TypeVar("_Made")

_SERVER = re.compile(r"tests/promises/recovery/.*\b((?:none|ngram|mtp|glm)-tp\d)")
# Each has one server at most, compiles once, or makes models that all its tests read.
_MODULE = re.compile(
    r"tests/(?:abuse|clients|e2e|kernels(?=/test_(?:build|prebuilt))|worker|promises/(?:speculation"
    r"|recovery(?=/test_(?:group|poisoned|silly))))(?:/\w+)*/test_\w+\.py"
)


class ByServer(LoadScopeScheduling):  # type: ignore[misc]  # published without types
    """One test after the other, but those of one server or model in one worker: made once."""

    def _split_scope(self, nodeid: str) -> str:
        if (server := _SERVER.search(nodeid)) is not None:
            return server[1]
        module = _MODULE.search(nodeid)
        return module[0] if module is not None else nodeid


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return an own folder of this run, the same in all its workers."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def once(path: Path, make: Callable[[], _Made]) -> _Made:
    """Return what lies pickled at a path; the first who asks makes it."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        made: _Made = pickle.loads(path.read_bytes())  # our own
        return made
