"""Turns to compile a grammar: who has one, who waits, and who is refused."""

from __future__ import annotations

import asyncio

import pytest
from surestep_common.errors import QueueFull, Unavailable
from surestep_scheduler.engine.compilations import (
    AT_ONCE,
    AT_ONCE_OF_TENANT,
    MOST_WAITING_OF_TENANT,
    Compilations,
)


class Turns:
    """Turns that last until they are told to end."""

    def __init__(self, compilations: Compilations) -> None:
        self._compilations = compilations
        self.running: list[str] = []
        self.ends = asyncio.Event()

    async def take(self, tenant: str) -> None:
        async with self._compilations.turn(tenant):
            self.running.append(tenant)
            await self.ends.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_leaves_room_for_others() -> None:
    turns = Turns(Compilations())
    async with asyncio.TaskGroup() as tasks:
        for tenant in ["greedy"] * 10 + ["modest"] * 2:
            tasks.create_task(turns.take(tenant))
        await settled()
        assert sorted(turns.running) == ["greedy"] * AT_ONCE_OF_TENANT + ["modest"]
        turns.ends.set()
    assert len(turns.running) == 12


async def test_a_turn_ends_when_its_task_does_and_the_next_is_that_of_whom_has_fewest() -> None:
    turns = Turns(Compilations())
    first = [asyncio.create_task(turns.take(tenant)) for tenant in "aaab"]
    await settled()
    assert len(turns.running) == AT_ONCE
    waiting = [asyncio.create_task(turns.take(tenant)) for tenant in "abc"]
    await settled()
    first[0].cancel()
    await settled()
    assert turns.running[AT_ONCE:] == ["c"]
    waiting[0].cancel()  # one that has no turn gives none back
    await settled()
    assert turns.running[AT_ONCE:] == ["c"]
    turns.ends.set()
    await asyncio.gather(*first, *waiting, return_exceptions=True)
    assert sorted(turns.running[AT_ONCE:]) == ["b", "c"]


async def test_too_many_of_a_tenant_are_refused_and_who_waits_too_long_is_told() -> None:
    turns = Turns(Compilations(wait_s=0.2))
    count = AT_ONCE_OF_TENANT + MOST_WAITING_OF_TENANT
    tasks = [asyncio.create_task(turns.take("greedy")) for _ in range(count)]
    await settled()
    with pytest.raises(QueueFull) as refused:
        await turns.take("greedy")
    assert refused.value.retry_after
    late = await asyncio.gather(*tasks[AT_ONCE_OF_TENANT:], return_exceptions=True)
    assert all(isinstance(error, Unavailable) and error.retry_after for error in late)
    turns.ends.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await turns.take("greedy")  # nothing is held any more
