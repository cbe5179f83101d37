"""The shapes of captured steps: few, because each takes time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from operator import le
from typing import NamedTuple

_MOST_TOKENS = 1024  # larger steps keep the device busy for longer than their launches take
_LEAST_PROMPTS = 32  # tokens of the smallest step with prompts
_STOPS = 8  # stop ids per row, shared by all rows


class Bucket(NamedTuple):
    """The largest step of a captured shape; smaller steps are padded.

    There are two kinds: windows alone, and windows among prompts of any lengths.
    """

    rows: int
    window: int  # sampled positions of a row
    tokens: int  # of all rows together; the same for positions that a drafter catches up with
    longest: int  # tokens of a row

    @property
    def positions(self) -> int:
        """Return the sampled positions of all rows together."""
        return min(self.rows * self.window, self.tokens)

    @property
    def stops(self) -> int:
        """Return the stop ids of all rows together."""
        return self.rows * _STOPS

    @property
    def room(self) -> StepSize:
        """Return the size of the largest step that fits."""
        return StepSize(*self, self.positions, self.stops)


class StepSize(NamedTuple):
    """The sizes of a step that a bucket bounds."""

    rows: int
    window: int
    tokens: int
    longest: int
    positions: int
    stops: int


def make_buckets(max_rows: int, max_window: int, max_tokens: int) -> list[Bucket]:
    """Return all buckets, the largest first, whose memory those captured later share."""
    windows = (
        Bucket(rows, window, rows * window, window)
        for window in _doubling(max_window)
        for rows in _steps(max_rows)
        if rows * window <= max(_MOST_TOKENS, max_window)
    )
    prompts = (
        Bucket(rows, max_window, tokens, tokens)
        for tokens in _steps(min(max_tokens, _MOST_TOKENS))
        for rows in {min(tokens, max_rows, count) for count in (8, 64, max_rows)}
        if tokens >= _LEAST_PROMPTS
    )
    return sorted({*windows, *prompts}, key=lambda b: (b.tokens, b.positions, b), reverse=True)


def in_order(buckets: Iterable[Bucket]) -> list[tuple[StepSize, Bucket]]:
    """Return buckets with their room, in the order in which they are tried for a step.

    Narrow windows come first: a captured drafter always fills the whole window.
    """
    ordered = sorted(buckets, key=lambda b: (b.window, b.longest, b.tokens, b.rows))
    return [(bucket.room, bucket) for bucket in ordered]


def find_bucket(size: StepSize, ordered: Iterable[tuple[StepSize, Bucket]]) -> Bucket | None:
    """Return the first bucket that has room for a step of this size, None if none has."""
    return next((bucket for room, bucket in ordered if all(map(le, size, room))), None)


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4, .. and `most`."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})


def _steps(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, .. and `most`: padding adds at most a half."""
    between = {3 << i for i in range(most.bit_length()) if 3 << i < most}
    return sorted({*_doubling(most), *between})
