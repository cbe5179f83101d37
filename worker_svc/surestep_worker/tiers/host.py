"""The tier in the rank's own memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from .entry import Entry, Name


class HostTier:
    """Entries in memory. They end with the process."""

    label = "host"

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.nbytes = 0
        self._entries = OrderedDict[Name, Entry]()  # used longest ago first
        self._lock = threading.Lock()

    def present(self, names: Sequence[Name]) -> list[bool]:
        return [name in self._entries for name in names]

    def read(self, name: Name) -> Entry | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
        return entry

    def write(self, name: Name, entry: Entry) -> None:
        with self._lock:
            self._drop(name)
            self._entries[name] = entry
            self.nbytes += entry.nbytes
            while self.nbytes > self._most_bytes:
                self._drop(next(iter(self._entries)))

    def remove(self, names: Sequence[Name]) -> None:
        with self._lock:
            for name in names:
                self._drop(name)

    def _drop(self, name: Name) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
