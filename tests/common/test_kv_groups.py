"""What KV groups keep, against a count of the positions that tokens see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.invariants import LedgerError
from surestep_common.kv_groups import ALL, KVGroups, check_given_back

WINDOWS = st.lists(st.sampled_from([ALL, 1, 2, 3, 5, 8, 13]), min_size=1, max_size=3).map(tuple)
SIZES = st.integers(1, 7)
LENGTHS = st.integers(0, 60)


def seen(window: int, position: int) -> range:
    """The positions that the token at one sees."""
    return range(0 if window == ALL else max(position + 1 - window, 0), position + 1)


def blocks_at(window: int, size: int, start: int, num_tokens: int) -> set[int]:
    """Blocks with what so many tokens from `start` on see."""
    rows = range(start, start + num_tokens)
    return {position // size for row in rows for position in seen(window, row)}


@given(windows=WINDOWS, size=SIZES, length=LENGTHS)
def test_the_first_block_is_the_first_that_is_seen(
    windows: tuple[int, ...], size: int, length: int
) -> None:
    groups = KVGroups(windows, size)
    for window in windows:
        first = min(blocks_at(window, size, length, 50))
        assert groups.first_block(window, length) == first
        if window != ALL:
            assert groups.first_blocks(window, np.array([length])).tolist() == [first]


@given(window=st.integers(1, 20), size=SIZES, num_tokens=st.integers(1, 9))
def test_the_most_blocks_at_once_are_reached_and_never_exceeded(
    window: int, size: int, num_tokens: int
) -> None:
    starts = range(window, window + 3 * size)
    counts = [len(blocks_at(window, size, start, num_tokens)) for start in starts]
    assert KVGroups((window,), size).most_at_once(window, num_tokens) == max(counts)


@given(windows=WINDOWS, size=SIZES, length=st.integers(1, 60), num_tokens=st.integers(1, 9))
def test_a_request_needs_what_its_rows_see_at_most(
    windows: tuple[int, ...], size: int, length: int, num_tokens: int
) -> None:
    needed = KVGroups(windows, size).blocks_of(length, num_tokens)
    exact = 0
    for window in windows:
        starts = range(length)
        rows = [(start, min(num_tokens, length - start)) for start in starts]
        exact += max(len(blocks_at(window, size, *row)) for row in rows)
    assert exact <= needed <= exact + len(windows)  # a short request may begin at a border


@given(windows=WINDOWS, size=SIZES, num_blocks=st.integers(0, 40), most=st.integers(1, 100))
def test_the_longest_request_is_the_longest_that_fits(
    windows: tuple[int, ...], size: int, num_blocks: int, most: int
) -> None:
    groups = KVGroups(windows, size)
    longest = groups.longest(num_blocks, most)
    fits = [length for length in range(most + 1) if groups.blocks_of(length) <= num_blocks]
    assert longest == max(fits)


def test_one_group_that_sees_all_is_as_large_as_the_pool() -> None:
    groups = KVGroups((ALL,), 16)
    assert groups.longest(10, 1000) == 160
    assert groups.blocks_of(161) == 11
    assert not groups.sliding


def test_what_is_seen_is_not_given_back() -> None:
    groups = KVGroups((ALL, 8), 4)
    check_given_back(groups, 1, 3, 2, 15)  # the token at 15 sees 8 to 15
    with pytest.raises(
        LedgerError, match=r"slot 3: blocks before 3 of KV group 1 .* 2 is the first"
    ):
        check_given_back(groups, 1, 3, 3, 15)
    with pytest.raises(LedgerError, match="blocks before 1 of KV group 0"):
        check_given_back(groups, 0, 3, 1, 1000)
