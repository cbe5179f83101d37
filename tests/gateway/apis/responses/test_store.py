"""The store of responses in memory: its bounds, and whose records go first."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from surestep_gateway.apis.responses.store import MemoryStore

PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), max_size=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, *, most: int = 3, most_bytes: int = 4000) -> MemoryStore:
    return MemoryStore(most=most, most_bytes=most_bytes, lifetime_s=10, clock=clock or Clock())


async def test_the_oldest_go_first() -> None:
    kept = store()
    for name in "abcd":
        assert await kept.put(f"me:{name}", b"x")
    assert [await kept.get(f"me:{name}") for name in "abcd"] == [None, b"x", b"x", b"x"]


async def test_bytes_are_bounded_and_one_has_a_quarter() -> None:
    kept = store(most=100)
    assert not await kept.put("me:large", b"x" * 1001)
    for number in range(10):
        assert await kept.put(f"me:{number}", b"x" * 1000)
    found = [await kept.get(f"me:{number}") is not None for number in range(10)]
    assert found == [False] * 6 + [True] * 4


@pytest.mark.parametrize("full", ["count", "bytes"])
@given(puts=PUTS)
@example(puts=[*zip("ab" * 4, [1, 1, 999, 999, 500, 500, 500, 500], strict=True), ("c", 10)])
async def test_who_has_most_of_what_is_full_loses_the_oldest(
    full: str, puts: list[tuple[str, int]]
) -> None:
    """Whatever the records take of the other bound, and whoever stores one more."""
    counted = full == "count"
    kept = store(most=6 if counted else 1000, most_bytes=10**6 if counted else 4000)
    held: dict[str, dict[str, int]] = {}  # sizes of each owner's records, the oldest first
    for number, (owner, size) in enumerate(puts):
        held.setdefault(owner, {})[f"{owner}:{number}"] = size
        await kept.put(f"{owner}:{number}", b"x" * size)
        gone = {key for of in held.values() for key in of if await kept.get(key) is None}
        while gone:
            most = max(_taken(of, counted) for of in held.values())
            next_ones = {next(iter(of)) for of in held.values() if _taken(of, counted) == most}
            went = min(next_ones & gone, default="")
            assert went, f"{gone} went before {next_ones}"
            gone.remove(went)
            del held[went[0]][went]
        whole = sum(_taken(records, counted) for records in held.values())
        assert whole <= (6 if counted else 4000)


def _taken(records: dict[str, int], counted: bool) -> int:
    return len(records) if counted else sum(records.values())


async def test_many_small_records_do_not_push_out_a_large_one() -> None:
    kept = store(most=100)
    await kept.put("large:1", b"x" * 1000)
    for number in range(200):
        await kept.put(f"small:{number}", b"x")
    assert await kept.get("large:1") is not None


async def test_records_expire() -> None:
    clock = Clock()
    kept = store(clock)
    await kept.put("me:a", b"x")
    clock.now = 9
    await kept.put("me:b", b"y")
    assert await kept.get("me:a") == b"x"
    clock.now = 11
    assert await kept.get("me:a") is None
    assert not await kept.delete("me:a")
    assert await kept.get("me:b") == b"y"


async def test_a_record_is_replaced_and_deleted() -> None:
    kept = store()
    await kept.put("me:a", b"x")
    await kept.put("me:a", b"y")
    assert await kept.get("me:a") == b"y"
    assert await kept.delete("me:a")
    assert not await kept.delete("me:a")
    assert await kept.get("me:a") is None
