"""A task ends although its task group swallows a cancellation."""

from __future__ import annotations

import asyncio

from surestep_common.tasks import end


async def test_a_cancellation_that_meets_a_failing_child_is_repeated() -> None:
    failing, survived = asyncio.Event(), 0

    async def child() -> None:
        await failing.wait()
        raise OSError

    async def owner() -> None:
        nonlocal survived
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(child())
                    await asyncio.sleep(60)
            except* OSError:
                survived += 1
                failing.clear()

    task = asyncio.create_task(owner())
    await asyncio.sleep(0)  # the owner is in its group
    await asyncio.sleep(0)  # the child waits
    failing.set()
    await asyncio.sleep(0)  # the child fails; its owner has not been told
    async with asyncio.timeout(5):
        await end(task)
    assert task.cancelled()
    assert survived <= 1


async def test_a_task_that_has_ended_keeps_its_result() -> None:
    async def seven() -> int:
        return 7

    task = asyncio.create_task(seven())
    await task
    await end(task)
    assert task.result() == 7
