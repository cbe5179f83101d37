"""The log of the block pool: which content becomes findable, and which no longer is.

A router outside keeps an index by it. The log knows the tokens of all that was told, so that what
outlives an epoch can be told again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple


class Source(NamedTuple):
    """Dependencies of a block besides its tokens, as far as others may know them."""

    salt: str = ""
    adapter: str = ""
    adapter_id: int | None = None
    windows: tuple[int, ...] = ()  # by KV group


ANY_SOURCE = Source()


class Content(NamedTuple):
    """Content of a block."""

    key: bytes  # with its KV group
    parent: bytes | None  # key of the block before, without a group; None for the first
    tokens: array[int]
    source: Source


# A stored block, the key of a removed one, or None: nothing that was told before is there any more.
Event = Content | bytes | None


class CacheLog:
    """Events since they were last taken. `wake` is called with the first of them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: list[Event] = []
        self._told: dict[bytes, Content] = {}  # by key
        self._cleared: dict[bytes, Content] = {}  # what was told before the newest clearing
        self.num_batches = self.num_dropped = 0  # that went to the publisher, and that it dropped

    def stored(self, content: Content) -> None:
        """Tell content that is findable from now on."""
        self._told[content.key] = content
        self._add(content)

    def removed(self, key: bytes) -> None:
        """Take back what was told of a key, if anything was."""
        if self._told.pop(key, None) is not None:
            self._add(key)

    def cleared(self) -> None:
        """Take back all that was told."""
        self._cleared, self._told = self._told, {}
        if not self._events:
            self._wake()
        self._events = [None]  # events before are of no use to anybody

    def tell_again(self, is_there: Callable[[bytes], bool]) -> None:
        """Tell what is there still of all that was taken back."""
        for key, content in self._cleared.items():
            if is_there(key):
                self.stored(content)
        self._cleared = {}

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        if not self._events:
            self._wake()
        self._events.append(event)
