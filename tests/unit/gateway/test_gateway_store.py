"""The store of responses in memory: its bounds, and whose records go first."""

from __future__ import annotations

from surestep_gateway.stored.store import MemoryStore


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


async def test_who_has_most_loses() -> None:
    kept = store(most=100)
    await kept.put("small:1", b"x" * 100)
    for number in range(20):
        await kept.put(f"large:{number}", b"x" * 1000)
    assert await kept.get("small:1") is not None


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
