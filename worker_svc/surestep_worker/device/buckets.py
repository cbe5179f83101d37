"""The shapes of step that are captured: few, as each takes time and memory before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from surestep_worker.plan import Rows

_MOST_TOKENS = 1024  # of larger steps the device has work for longer than their launches take


class Bucket(NamedTuple):
    """Steps of windows alone: at most so many rows, with at most so many tokens each."""

    rows: int
    window: int


def make_buckets(max_rows: int, max_window: int) -> list[Bucket]:
    """All of them, the largest first: what is captured later finds memory that it may share."""
    sizes = [
        Bucket(rows, window)
        for window in _doubling(max_window)
        for rows in _doubling(max_rows)
        if rows * window <= max(_MOST_TOKENS, max_window)
    ]
    return sorted(sizes, key=lambda bucket: bucket.rows * bucket.window, reverse=True)


def find_bucket(rows: Rows, buckets: Sequence[Bucket], *, catches_up: bool) -> Bucket | None:
    """The least bucket that has room for the rows; None where none has, or some row is a prompt's.

    A drafter that `catches_up` may do so by as many tokens in each row as a window has.
    """
    if not len(rows) or rows.is_prefill.any():
        return None
    window = 1 + int(rows.k_cap.max())
    if catches_up:
        window = max(window, int(rows.catch_up.max()))
    fits = (bucket for bucket in buckets if bucket.rows >= len(rows) and bucket.window >= window)
    return min(fits, key=lambda bucket: (bucket.window, bucket.rows), default=None)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, .. and `most`."""
    return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})
