"""KV groups: layers that see the same positions share block tables, and windows give blocks back.

Every request has one block table for each group, and all groups take their blocks from one pool. In
a group whose layers see the last `window` positions only, a block is of no use once `window`
positions have been committed behind its last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .invariants import IntArray, LedgerError

ALL = 0  # window of layers that see every position


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Windows of the groups in tokens, a token itself included, and tokens in a block."""

    windows: tuple[int, ...]
    block_size: int

    @property
    def sliding(self) -> list[tuple[int, int]]:
        """Index and window of each group that gives blocks back."""
        return [(group, window) for group, window in enumerate(self.windows) if window != ALL]

    def first_block(self, window: int, length: int) -> int:
        """Return the first block that tokens from position `length` on see."""
        return max(length + 1 - window, 0) // self.block_size if window != ALL else 0

    def first_blocks(self, window: int, lengths: IntArray) -> IntArray:
        """Return the same for each of `lengths`; the window is not ALL."""
        return np.maximum(lengths + 1 - window, 0) // self.block_size

    def most_at_once(self, window: int, num_tokens: int) -> int:
        """Return the most blocks in which so many consecutive tokens and what they see can lie."""
        assert window != ALL
        return -(-(window + num_tokens - 2) // self.block_size) + 1

    def blocks_of(self, length: int, num_tokens: int = 1) -> int:
        """Return the blocks with which a request of `length` tokens can be computed to its end.

        `num_tokens` is the most that one row of it computes.
        """
        whole = -(-length // self.block_size)
        return sum(
            whole if window == ALL else min(whole, self.most_at_once(window, num_tokens))
            for window in self.windows
        )

    def longest(self, num_blocks: int, most: int, num_tokens: int = 1) -> int:
        """Return the most tokens, up to `most`, that so many blocks are enough for."""
        low, high = 0, -(-most // self.block_size)  # whole blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_of(middle * self.block_size, num_tokens) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, most)


def check_given_back(
    groups: KVGroups, group: int, slot: int, first_block: int, length: int
) -> None:
    """Raise LedgerError if blocks before `first_block` are seen from position `length` on."""
    seen = groups.first_block(groups.windows[group], length)
    if first_block > seen:
        raise LedgerError(
            f"slot {slot}: blocks before {first_block} of KV group {group} are given back, "
            f"{seen} is the first that is seen from token {length} on"
        )
