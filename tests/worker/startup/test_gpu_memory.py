"""Whatever others hold and the parts need: never more than a rank may take, nor than there is."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from surestep_worker.host.host_memory import GIB, OutOfMemory
from surestep_worker.startup.gpu_memory import (
    MemoryShare,
    MemorySnapshot,
    Usage,
    bytes_taken,
    left_for_caches,
    memory_limit,
)

totals = st.integers(1 * GIB, 192 * GIB)
fractions = st.floats(0.01, 1.0)
bytes_ = st.integers(0, 200 * GIB)
usages = st.builds(Usage, bytes_, bytes_, bytes_, bytes_)
sharers = st.integers(1, 8)


@st.composite
def starts(draw: st.DrawFn) -> MemorySnapshot:
    """A GPU on which others hold something, or nothing."""
    total = draw(totals)
    return MemorySnapshot(draw(st.integers(0, total)), total, reserved=0)


@given(starts(), fractions, sharers, usages)
def test_all_of_it_is_within_the_part_and_within_what_is_free(
    start: MemorySnapshot, fraction: float, num: int, usage: Usage
) -> None:
    limit = memory_limit(MemoryShare(fraction, explicit=False, sharers=num), start)
    kept = usage.weights + usage.states  # is there when graphs and steps gave back theirs
    caches = left_for_caches(limit, usage, start._replace(free=max(0, start.free - kept)))
    assert caches >= 0
    assert not caches or caches + usage.total <= limit <= start.free
    assert limit <= fraction * start.total / num
    assert limit * num <= start.free  # those beside it have looked at the same moment


@given(starts(), fractions, fractions, sharers, usages, st.booleans())
def test_a_larger_part_never_leaves_less(
    start: MemorySnapshot, one: float, other: float, num: int, usage: Usage, explicit: bool
) -> None:
    less, more = (MemoryShare(part, explicit, num) for part in sorted((one, other)))
    try:
        large = memory_limit(more, start)
    except OutOfMemory:
        assume(False)
    small = memory_limit(less, start)
    assert small <= large
    assert left_for_caches(small, usage, start) <= left_for_caches(large, usage, start)


@given(starts(), fractions, sharers)
def test_a_part_that_was_asked_for_is_had_or_refused(
    start: MemorySnapshot, part: float, num: int
) -> None:
    share = int(part * start.total) // num
    if share <= start.free:
        assert memory_limit(MemoryShare(part, explicit=True, sharers=num), start) == share
    else:
        with pytest.raises(OutOfMemory, match=r"--gpu-memory-utilization .* are free"):
            memory_limit(MemoryShare(part, explicit=True, sharers=num), start)


@given(starts(), usages, bytes_)
def test_who_takes_memory_meanwhile_has_it(
    start: MemorySnapshot, usage: Usage, others: int
) -> None:
    """Memory that went to others since the rank began is not given away once more."""
    limit = memory_limit(MemoryShare(0.9, explicit=False), start)
    now = start._replace(free=max(0, start.free - usage.weights - usage.states - others))
    caches = left_for_caches(limit, usage, now)
    assert not caches or caches + usage.graphs + usage.step <= now.free


@given(starts(), bytes_, bytes_, bytes_)
def test_what_others_give_back_is_not_ours(
    before: MemorySnapshot, torchs: int, freed: int, code: int
) -> None:
    took = torchs + code
    after = MemorySnapshot(before.free - took + freed, before.total, before.reserved + torchs)
    assert bytes_taken(before, after) >= torchs
    assert bytes_taken(before, after) <= took
    quiet = MemorySnapshot(before.free - took, before.total, before.reserved + torchs)
    assert bytes_taken(before, quiet) == took


def test_two_engines_share_a_card() -> None:
    """Each names its part of it, and the second one's has to be free."""
    total, first = 80 * GIB, 38 * GIB
    start = MemorySnapshot(total - first - GIB, total, 0)
    assert memory_limit(MemoryShare(0.45, explicit=True), start) == int(0.45 * total)
    with pytest.raises(
        OutOfMemory, match=r"0\.9: 72\.00 GiB of 80\.00 GiB .* only 41\.00 GiB"
    ) as e:
        memory_limit(MemoryShare(0.9, explicit=True), start)
    assert "lower it to 0.51" in str(e.value)
    assert memory_limit(MemoryShare(0.51, explicit=True), start) <= start.free
    # Not explicit: what others hold comes off the share, with a tenth of the GPU unused.
    assert memory_limit(MemoryShare(0.9, explicit=False), start) == pytest.approx(33 * GIB, abs=2)


def test_ranks_on_one_card_share_the_part() -> None:
    start = MemorySnapshot(80 * GIB, 80 * GIB, 0)
    assert memory_limit(MemoryShare(0.9, explicit=True, sharers=2), start) == pytest.approx(
        36 * GIB, abs=2
    )


def test_a_size_that_is_given_may_take_all_that_is_free() -> None:
    assert (
        memory_limit(MemoryShare(None, explicit=True), MemorySnapshot(50 * GIB, 80 * GIB, 0))
        == 50 * GIB
    )
