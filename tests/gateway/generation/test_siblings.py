"""Requests of many sequences and queues with room for few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from support.fakes.scheduler import emulated, start, tokens
from support.processes.gateway_stack import Stack
from surestep_common.errors import QueueFull
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest


class Narrow:
    """A queue with so many places, which are left one after the other."""

    def __init__(self, stack: Stack, places: int) -> None:
        self.places = places
        self.refusals = 0
        self._slot = asyncio.Lock()
        stack.scheduler.script = self.script

    async def script(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if not self.places:
            self.refusals += 1
            raise QueueFull("the queue is full", retry_after=1)
        self.places -= 1
        async with self._slot:
            await asyncio.sleep(0.01)
            self.places += 1
            yield start()
            yield tokens(emulated(request), finish=LENGTH)


async def test_siblings_wait_for_room_while_one_is_accepted(stack: Stack) -> None:
    quiet = (await stack.complete(n=12, max_tokens=4, seed=5)).json()["choices"]
    queue = Narrow(stack, places=3)
    async with asyncio.timeout(15):
        response = await stack.complete(n=12, max_tokens=4, seed=5)
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == quiet
    assert 0 < queue.refusals < 12 * 4  # each place that is left is tried for once


async def test_all_are_refused_where_there_is_no_room_at_all(stack: Stack) -> None:
    Narrow(stack, places=0)
    response = await stack.complete(n=5, max_tokens=4)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


async def test_a_lone_sequence_is_refused_at_once(stack: Stack) -> None:
    Narrow(stack, places=0)
    assert (await stack.complete(max_tokens=4)).status_code == 429


async def test_siblings_wait_for_room_that_others_make(stack: Stack) -> None:
    """Strangers fill the queue when some of the siblings have run already."""
    queue = Narrow(stack, places=2)
    stack.scheduler.info.max_num_seqs = 2
    async with asyncio.TaskGroup() as group:
        mine = group.create_task(stack.complete(n=6, max_tokens=4))
        await stack.scheduler.until(lambda fake: len(fake.requests) > 2)
        queue.places -= 1
        await asyncio.sleep(0.2)
        queue.places += 1
    assert mine.result().status_code == 200
