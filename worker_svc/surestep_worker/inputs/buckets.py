"""The shapes of step that are captured: few, as each takes time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from operator import le
from typing import NamedTuple

_MOST_TOKENS = 1024  # of larger steps the device has work for longer than their launches take
_LEAST_PROMPTS = 32  # tokens of the least step with prompts
_STOPS = 8  # stop ids for each row, which rows share


class Bucket(NamedTuple):
    """Steps of at most so much; what a step has less is padding.

    There are two kinds: windows alone, and windows among prompts of whatever lengths.
    """

    rows: int
    window: int  # sampled positions of a row
    tokens: int  # of all rows together, as are those that a drafter's state follows by
    longest: int  # tokens of a row

    @property
    def positions(self) -> int:
        """Sampled ones of all rows together."""
        return min(self.rows * self.window, self.tokens)

    @property
    def stops(self) -> int:
        """Stop ids of all rows together."""
        return self.rows * _STOPS

    @property
    def room(self) -> StepSize:
        """The most that fits."""
        return StepSize(*self, self.positions, self.stops)


class StepSize(NamedTuple):
    """What a step has of each."""

    rows: int
    window: int
    tokens: int
    longest: int
    positions: int
    stops: int


def make_buckets(max_rows: int, max_window: int, max_tokens: int) -> list[Bucket]:
    """All of them, the largest first: what is captured later finds memory that it may share."""
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
    """The room of each, and the bucket itself; a step gets the first that has room for it.

    Narrow windows come first: a drafter drafts for all of a window, whoever asks for less.
    """
    ordered = sorted(buckets, key=lambda b: (b.window, b.longest, b.tokens, b.rows))
    return [(bucket.room, bucket) for bucket in ordered]


def find_bucket(need: StepSize, ordered: Iterable[tuple[StepSize, Bucket]]) -> Bucket | None:
    """The least bucket that has room for a step; None where none has."""
    return next((bucket for room, bucket in ordered if all(map(le, need, room))), None)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})


def _steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, .. and `most`: at most half as much again as is needed."""
    between = {3 << i for i in range(most.bit_length()) if 3 << i < most}
    return sorted({*_doubling(most), *between})
