"""The tier in a folder, which several replicas may share: a file for each entry.

A file is written beside its place and moved there, so that readers find it whole or not at all; a
machine that loses power may leave others, whose digests are wrong. Its time of modification says
when it was used last. All identities share the bound of a folder, and every process that writes
keeps to it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .entry import HEAD_BYTES, Entry, EntryForm, Name, Refused, bytes_of

_KEPT_SHARE = 0.9  # of the bound, that an eviction leaves
_LOOK_S = 60.0  # between two looks at what others have written
_TOUCH_S = 60.0  # a file that was used no longer ago is not marked again
_STALE_S = 600.0  # a file that is still being written after so long never will be
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"[0-9a-f]{2,40}\.(block|drafted|snapshot)(\.\d+-\d+)?")


class _File(NamedTuple):
    used_at: float
    nbytes: int
    path: str


class FolderTier:
    """Entries of one identity in a folder."""

    label = "folder"

    def __init__(self, root: Path, most_bytes: int, form: EntryForm) -> None:
        self._root, self._most_bytes, self._form = root, most_bytes, form
        self._mine = root / form.identity.hex()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the books below
        self._nbytes = 0  # of all identities, as far as is known
        self._look_at = 0.0

    def _path(self, name: Name) -> str:
        return f"{self._mine}/{name.key[:1].hex()}/{name}"

    def present(self, names: Sequence[Name]) -> list[bool]:
        return [os.path.exists(self._path(name)) for name in names]

    def read(self, name: Name, nbytes: int) -> Entry | None:
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0, opener=_unblocked) as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise Refused("it is no file")
                data = torch.empty(HEAD_BYTES + nbytes, dtype=torch.uint8)
                count = file.readinto(bytes_of(data))
        except FileNotFoundError:
            return None
        if not count == about.st_size == len(data):
            raise Refused(f"its file has {about.st_size} bytes")
        entry = self._form.unpack(name, data, nbytes)
        if time.time() - about.st_mtime > _TOUCH_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return entry

    def write(self, name: Name, entry: Entry) -> None:
        path = self._path(name)
        written = f"{path}.{os.getpid()}-{next(self._numbers)}"
        if not os.path.isdir(os.path.dirname(path)):
            self._mine.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            with open(written, "xb", buffering=0, opener=_private) as file:
                for part in entry.parts:
                    _write_all(file.fileno(), part)
            os.replace(written, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise
        self._grown(entry.nbytes)

    def remove(self, names: Sequence[Name]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))

    def _grown(self, nbytes: int) -> None:
        """Count what was written, and give up what was used longest ago if it is too much."""
        with self._lock:
            self._nbytes += nbytes
            now = time.monotonic()
            if self._nbytes <= self._most_bytes and now < self._look_at:
                return
            self._look_at = now + _LOOK_S
            files = sorted(self._files())
            self._nbytes = sum(file.nbytes for file in files)
            if self._nbytes <= self._most_bytes:
                return
            for file in files:
                if self._nbytes <= _KEPT_SHARE * self._most_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):  # others evict, too
                    os.unlink(file.path)
                self._nbytes -= file.nbytes

    def _files(self) -> Iterator[_File]:
        """Yield the files of all identities; what is not ours is left alone, and not counted."""
        for identity in _entries(str(self._root)):
            if not _IDENTITY.fullmatch(identity.name):
                continue
            for part in _entries(identity.path):
                for file in _entries(part.path):
                    with contextlib.suppress(FileNotFoundError):
                        about = file.stat(follow_symlinks=False)
                        if not _FILE.fullmatch(file.name):
                            continue
                        unfinished = file.name.count(".") > 1
                        if unfinished and time.time() - about.st_mtime > _STALE_S:
                            os.unlink(file.path)
                            continue
                        yield _File(about.st_mtime, about.st_size, file.path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unblocked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in its place is not waited for


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
