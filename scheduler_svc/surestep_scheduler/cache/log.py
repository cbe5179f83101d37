"""The log of the block pool: which content becomes findable, and which no longer is.

A router outside keeps an index by it. The log knows the tokens of all that was told, so that it can
be told again: what outlives an epoch, and all of it to a router that comes late.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

KEY_BYTES = 16


class Source(NamedTuple):
    """Dependencies of a block besides its tokens, as far as others may know them."""

    salt: str = ""  # see told_salt
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


class Told:
    """Content that was told to be there, and what only leads to it.

    A router names a block after the tokens of its whole prefix, so it must be told of the blocks
    before one first, also of those that are gone.
    """

    def __init__(self) -> None:
        self._there: dict[bytes, Content] = {}
        self._gone: dict[bytes, Content] = {}  # which others follow, by key without a group
        self._followers = Counter[bytes]()  # of a block, by key without a group

    def add(self, content: Content) -> None:
        """Note that it is there."""
        self._there[content.key] = content
        if content.parent is not None:
            self._followers[content.parent] += 1

    def remove(self, key: bytes) -> bool:
        """Note that it is gone. Return whether it was there."""
        content, bare = self._there.pop(key, None), key[:KEY_BYTES]
        if content is None:
            return False
        if bare in self._followers and bare not in self._gone:
            self._gone[bare] = content
        else:
            self._unfollow(content)
        return True

    def _unfollow(self, content: Content | None) -> None:
        while content is not None and (parent := content.parent) is not None:
            self._followers[parent] -= 1
            if self._followers[parent]:
                return
            del self._followers[parent]
            content = self._gone.pop(parent, None)

    def copy(self) -> Told:
        """Return what is told now."""
        copied = Told()
        copied._there, copied._gone = self._there.copy(), self._gone.copy()
        return copied

    def __iter__(self) -> Iterator[Event]:
        """Yield the events that tell a router all of it, whatever it was told before."""
        yield None
        yield from self.events(lambda _: True)

    def events(self, is_there: Callable[[bytes], bool]) -> Iterator[Event]:
        """Yield what tells it to a router that knows nothing: blocks before those that follow them,
        and at the end the removal of those that are not there.
        """
        told, gone = set[bytes](), list[bytes]()
        for content in list(self._there.values()):
            if is_there(content.key):
                for each in reversed(list(self._lineage(content, told))):
                    yield each
                    if each.key not in self._there or not is_there(each.key):
                        gone.append(each.key)
        yield from gone

    def _lineage(self, content: Content | None, told: set[bytes]) -> Iterator[Content]:
        """Yield a block and those before it, up to one that was told already."""
        while content is not None and content.key not in told:
            told.add(content.key)
            yield content
            if (parent := content.parent) is None:
                return
            in_its_group = self._there.get(parent + content.key[KEY_BYTES:])
            content = in_its_group or self._there.get(parent) or self._gone.get(parent)


class CacheLog:
    """Events since they were last taken. `wake` is called with the first of them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._events: list[Event] = []
        self.told = Told()  # by these events and those before
        self._cleared = Told()  # what was told before the newest clearing
        self.num_batches = self.num_dropped = 0  # that went to the publisher, and that it dropped

    def stored(self, content: Content) -> None:
        """Tell content that is findable from now on."""
        self.told.add(content)
        self._add(content)

    def removed(self, key: bytes) -> None:
        """Take back what was told of a key, if anything was."""
        if self.told.remove(key):
            self._add(key)

    def cleared(self) -> None:
        """Take back all that was told."""
        self._cleared, self.told = self.told, Told()
        if not self._events:
            self._wake()
        self._events = [None]  # events before are of no use to anybody

    def tell_again(self, is_there: Callable[[bytes], bool]) -> None:
        """Tell what is there still of all that was taken back."""
        for event in self._cleared.events(is_there):
            if isinstance(event, Content):
                self.stored(event)
            elif event is not None:
                self.removed(event)
        self._cleared = Told()

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        if not self._events:
            self._wake()
        self._events.append(event)
