"""The tiers of a rank, one behind the other: what is in any of them is there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from surestep_common.log import Sparingly
from torch import Tensor

from .entry import Entry, EntryForm, Name, Refused
from .host import HostTier
from .tier import RestingTier, Tier

_sparingly = Sparingly(logging.getLogger(__name__))

_MOST_WAITING = 256 << 20  # bytes that wait to be written behind a slow tier
_ROOM_S = 5.0  # until there is room for one more entry


class Stack:
    """Memory first, which is written at once, and tiers behind it that a thread writes later."""

    def __init__(self, form: EntryForm, near: HostTier | None, far: Sequence[Tier]) -> None:
        self._form, self._near = form, near
        self._far = [RestingTier(tier) for tier in far]
        self._waiting = deque[tuple[Name, Entry | None]]()  # to be written; None: to be removed
        self._waiting_bytes = 0
        self._there_is = threading.Condition()
        self._closed = False
        self.num_refused = 0
        self._writer = threading.Thread(target=self._write_far, name="tier-writer", daemon=True)
        self._writer.start()

    def pack(self, name: Name, payload: Tensor, tokens: int = 0) -> Entry:
        """Return an entry with this content."""
        return self._form.pack(name, payload, tokens)

    def present(self, names: Sequence[Name]) -> list[bool]:
        """Return which entries some tier has."""
        near = self._near.present(names) if self._near is not None else [False] * len(names)
        found = dict(zip(names, near, strict=True))
        for far in self._far:
            missing = [name for name, there in found.items() if not there]
            there = far.call([False] * len(missing), far.tier.present, missing)
            found |= zip(missing, there, strict=True)
        return [found[name] for name in names]

    def read(self, name: Name, nbytes: int) -> Entry | None:
        """Return the entry of the nearest tier that has a whole one of `nbytes` of content."""
        if self._near is not None:
            entry = self._checked(name, self._near.read(name), nbytes)
            if entry is not None:
                return entry
        for far in self._far:
            entry = far.call(None, self._read_far, far.tier, name, nbytes)
            if entry is not None:
                if self._near is not None:
                    self._near.write(name, entry)
                return entry
        return None

    def _checked(self, name: Name, entry: Entry | None, nbytes: int) -> Entry | None:
        try:
            return None if entry is None else self._form.checked(name, entry, nbytes)
        except Refused as refused:
            self._refuse("host", name, refused)
            return None

    def _read_far(self, tier: Tier, name: Name, nbytes: int) -> Entry | None:
        try:
            return tier.read(name, nbytes)
        except Refused as refused:
            self._refuse(tier.label, name, refused)
            self._later(name, None)
            return None

    def _refuse(self, label: str, name: Name, refused: Refused) -> None:
        self.num_refused += 1
        _sparingly.warning("entry %s of the %s is not used: %s", name, label, refused)

    def lacks(self, name: Name) -> bool:
        """Return whether some tier that works has no such entry."""
        if self._near is not None and not self._near.present([name])[0]:
            return True
        return any(
            far.works and not far.call([True], far.tier.present, [name])[0] for far in self._far
        )

    def write(self, name: Name, entry: Entry) -> bool:
        """Store an entry in the tiers, later where that takes time; return whether one will."""
        if self._near is not None:
            self._near.write(name, entry)
        if not any(far.works for far in self._far):
            return self._near is not None
        return self._later(name, entry) or self._near is not None

    def remove(self, names: Sequence[Name]) -> None:
        """Remove entries from all tiers, behind what is being written."""
        if self._near is not None:
            self._near.remove(names)
        for name in names if self._far else ():
            self._later(name, None)

    def _later(self, name: Name, entry: Entry | None) -> bool:
        nbytes = entry.nbytes if entry is not None else 0
        with self._there_is:
            if entry is not None and not self._there_is.wait_for(self._has_room, _ROOM_S):
                return False
            self._waiting.append((name, entry))
            self._waiting_bytes += nbytes
            self._there_is.notify_all()
        return True

    def _has_room(self) -> bool:
        return self._waiting_bytes < _MOST_WAITING

    def _write_far(self) -> None:
        while True:
            with self._there_is:
                while not self._waiting:
                    if self._closed:
                        return
                    self._there_is.wait()
                name, entry = self._waiting.popleft()
            for far in self._far:
                if entry is None:
                    far.call(None, far.tier.remove, [name])
                else:
                    far.call(None, far.tier.write, name, entry)
            if entry is not None:
                with self._there_is:
                    self._waiting_bytes -= entry.nbytes
                    self._there_is.notify_all()

    def close(self, timeout_s: float) -> None:
        """Return when everything is written, or the time is over."""
        with self._there_is:
            self._closed = True
            self._there_is.notify_all()
        self._writer.join(timeout_s)
