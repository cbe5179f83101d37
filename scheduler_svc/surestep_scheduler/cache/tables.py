"""The block table of one tenancy in one KV group, and what the workers do not know of it yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class BlockTable:
    """Entries first..end-1; those before them were given back, or were never needed."""

    group: int
    first: int
    blocks: list[int]  # of these entries
    _told_first: int = 0
    _told_end: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def held(self, since: int, upto: int) -> list[int]:
        """Return the blocks of the entries since..upto-1, without those given back."""
        return self.blocks[max(since - self.first, 0) : max(upto - self.first, 0)]

    def give_back(self, first: int) -> list[int]:
        """Begin at entry `first` from now on; return the blocks before it."""
        count = first - self.first
        given_back, self.blocks[:count] = self.blocks[:count], []
        self.first = first
        return given_back

    def tell(self) -> tuple[int, list[int]]:
        """Return the entries given back and the blocks appended since the last call."""
        count, since = self.first - self._told_first, max(self._told_end, self.first)
        appended = self.blocks[since - self.first :]
        self._told_first, self._told_end = self.first, self.end
        return count, appended
