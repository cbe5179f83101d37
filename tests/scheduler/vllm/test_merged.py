"""Several streams as one: order, errors, and ends at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from surestep_common.errors import QueueFull
from surestep_proto.scheduler_pb2 import GenerateChunk
from surestep_scheduler.vllm.facts import Rate
from surestep_scheduler.vllm.merged import Merged

Ended = list[int]


async def stream(
    index: int, ended: Ended, count: int = 3, error: Exception | None = None
) -> AsyncGenerator[GenerateChunk, None]:
    """`count` chunks, and then an error, the end, or nothing any more."""
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield GenerateChunk(token_ids=[10 * index + number])
        if error is not None:
            raise error
        if count > 10:
            await asyncio.Event().wait()
    finally:
        ended.append(index)


async def read(merged: Merged) -> list[int]:
    return [chunk.token_ids[0] async for _, chunk in merged]


async def test_every_chunk_comes_once_and_in_its_streams_order() -> None:
    ended: Ended = []
    async with asyncio.TaskGroup() as tasks:
        merged = Merged(tasks, [stream(index, ended) for index in range(3)])
        got = await read(merged)
        await merged.close()
    assert sorted(got) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert all(
        [x for x in got if x // 10 == i] == sorted(range(10 * i, 10 * i + 3)) for i in (1, 2)
    )
    assert sorted(ended) == [0, 1, 2]


async def test_the_first_error_ends_all() -> None:
    ended: Ended = []
    async with asyncio.TaskGroup() as tasks:
        streams = [stream(0, ended, 11), stream(1, ended, 2, QueueFull("no room"))]
        merged = Merged(tasks, streams)
        with pytest.raises(QueueFull, match="no room"):
            await read(merged)
        await merged.close()
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("turns", range(8))
async def test_it_can_be_stopped_at_any_moment(turns: int) -> None:
    """Before its tasks have begun, too."""
    ended: Ended = []
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        merged = Merged(tasks, [stream(index, ended, 11) for index in range(2)])
        for _ in range(turns):
            await asyncio.sleep(0)
        merged.stop()
        got = await read(merged)
        await merged.close()
    assert len(got) <= 2 * turns
    assert len(ended) in (0, 2)  # none, if none has begun


async def test_closing_ends_what_nobody_reads() -> None:
    ended: Ended = []
    async with asyncio.TaskGroup() as tasks:
        merged = Merged(tasks, [stream(0, ended, 11)])
        async for _ in merged:
            break
        await merged.close()
    assert ended == [0]


def test_a_rate_is_over_the_last_seconds() -> None:
    rate = Rate()
    assert rate.at(0.0, 100) == 0
    assert rate.at(1.0, 150) == 50
    assert rate.at(5.0, 350) == 50  # since 0
    assert rate.at(9.0, 350) == pytest.approx(250 / 9)
    assert rate.at(10.0, 850) == 100  # since 5
    assert rate.at(30.0, 850) == 0
