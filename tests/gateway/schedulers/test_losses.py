"""Requests that end their scheduler, and requests that merely were there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fakes.scheduler import emulated, emulating, start, tokens
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ConnectionLost, ModelFault
from surestep_gateway.schedulers.losses import IsolationQueue, LossHistory
from surestep_proto.scheduler_pb2 import LENGTH, GenerateChunk, GenerateRequest

BODY: dict[str, Any] = {"max_tokens": 6, "seed": 3, "return_token_ids": True}


class Fragile:
    """A scheduler that dies when requests of some seed get so far; it takes a while over each token.

    `deaths` counts, by who was open without a token.
    """

    def __init__(self, stack: Stack, fatal_seed: int | None, after: int = 0) -> None:
        self._scheduler = stack.scheduler
        self._fatal_seed = fatal_seed
        self._after = after  # tokens
        self._dying = asyncio.Event()
        self.deaths = 0
        self.calls: Counter[int] = Counter()  # by seed
        self._given: dict[int, int] = {}  # tokens of each open call
        stack.scheduler.script = self.script

    async def script(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        seed = request.sampling.seed
        self.calls[seed] += 1
        call = self.calls.total()
        self._given[call] = 0
        yield start()
        try:
            for index, token in enumerate(emulated(request)):
                await asyncio.sleep(0.01)
                if seed == self._fatal_seed and index == self._after:
                    self._dying.set()
                    await asyncio.sleep(60)
                last = index == request.max_tokens - len(request.emitted_ids) - 1
                yield tokens([token], finish=LENGTH if last else 0)
                self._given[call] += 1
        finally:
            del self._given[call]

    async def live(self, kills: int = 0, between: int = 0) -> None:
        """Die when told, and come back; and be killed so many times besides, each time when all
        who are open have had some tokens."""
        while True:
            if kills > 0:
                kills -= 1
                while min(self._given.values(), default=0) < between:
                    await asyncio.sleep(0.01)
            else:
                await self._dying.wait()
            self.deaths += 1
            await self._scheduler.stop()
            self._dying.clear()  # whoever came while it ended is of the same death
            await self._scheduler.start()


async def ids_of(stack: Stack, seed: int, **changes: Any) -> list[int]:
    body = BODY | {"prompt": f"{seed}", "seed": seed} | changes
    response = await stack.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


async def quiet_answers(stack: Stack, seeds: range) -> dict[int, list[int]]:
    stack.scheduler.script = emulating
    return {seed: await ids_of(stack, seed) for seed in seeds}


async def test_who_ends_its_scheduler_fails_alone(start_stack: StartStack) -> None:
    """Nine that came with it, and lost the scheduler as often, get what they get without it."""
    stack = await start_stack(admission_timeout_s=20)
    quiet = await quiet_answers(stack, range(1, 10))
    fragile = Fragile(stack, fatal_seed=99)
    async with asyncio.TaskGroup() as group:
        life = group.create_task(fragile.live())
        others = [group.create_task(ids_of(stack, seed)) for seed in quiet]
        body = BODY | {"prompt": "x", "seed": 99}
        response = await stack.client.post("/v1/completions", json=body)
        answers = [await other for other in others]
        life.cancel()
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "model_error"
    assert error["message"] == "this request was open at 4 losses of its scheduler, at last alone"
    assert answers == list(quiet.values())
    assert 4 <= fragile.deaths <= 6  # one does not count while somebody else waits for a token


async def test_several_are_told_apart(start_stack: StartStack) -> None:
    stack = await start_stack(admission_timeout_s=20)
    quiet = await quiet_answers(stack, range(1, 6))
    fragile = Fragile(stack, fatal_seed=99)
    body = BODY | {"prompt": "x", "seed": 99}
    async with asyncio.TaskGroup() as group:
        life = group.create_task(fragile.live())
        guilty = [
            group.create_task(stack.client.post("/v1/completions", json=body)) for _ in range(3)
        ]
        others = [group.create_task(ids_of(stack, seed)) for seed in quiet]
        assert [(await one).status_code for one in guilty] == [500] * 3
        assert [await other for other in others] == list(quiet.values())
        life.cancel()
    assert fragile.deaths <= 2 + 3 * 2 + 2


async def test_a_scheduler_that_is_killed_again_and_again_fails_nobody(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there are tokens in between."""
    monkeypatch.setattr("surestep_gateway.schedulers.journal.MAX_RESUMES", 2)
    stack = await start_stack(admission_timeout_s=20)
    quiet = {seed: await ids_of(stack, seed, max_tokens=60) for seed in range(1, 5)}
    fragile = Fragile(stack, fatal_seed=None)
    async with asyncio.TaskGroup() as group:
        life = group.create_task(fragile.live(kills=8, between=5))
        answers = [group.create_task(ids_of(stack, seed, max_tokens=60)) for seed in quiet]
        assert [await answer for answer in answers] == list(quiet.values())
        life.cancel()
    assert fragile.deaths >= 4


@pytest.mark.parametrize("most", [0, 1])
async def test_losses_in_a_row_are_bounded(
    start_stack: StartStack, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("surestep_gateway.schedulers.journal.MAX_RESUMES", most)
    stack = await start_stack(admission_timeout_s=20)
    fragile = Fragile(stack, fatal_seed=99)
    async with asyncio.TaskGroup() as group:
        life = group.create_task(fragile.live())
        body = BODY | {"prompt": "x", "seed": 99}
        response = await stack.client.post("/v1/completions", json=body)
        life.cancel()
    assert response.status_code == 503
    assert fragile.deaths == 1 + most


async def lose(record: LossHistory, *, alone: bool = True) -> None:
    await record.turn()
    record.lost(ConnectionLost("gone"), alone=alone)


async def test_losses_in_company_of_newcomers_prove_nothing() -> None:
    record = LossHistory(IsolationQueue(), "r", max_losses=5)
    for _ in range(2):
        await lose(record)
    for _ in range(20):
        await lose(record, alone=False)
    await lose(record)
    with pytest.raises(ModelFault, match="open at 4 losses of its scheduler, at last alone"):
        await lose(record)


async def test_a_token_clears_of_everything() -> None:
    record = LossHistory(IsolationQueue(), "r", max_losses=5)
    for _ in range(10):
        for _ in range(3):
            await lose(record)
        await record.turn()
        record.token()


async def test_one_is_tried_at_a_time_behind_all_others() -> None:
    trials = IsolationQueue()
    first, second, other = (LossHistory(trials, name, max_losses=5) for name in "abc")
    for record in (first, second):
        for _ in range(2):
            await lose(record)
    await lose(other)  # it goes on, and has no token yet
    async with asyncio.TaskGroup() as group:
        one = group.create_task(first.turn())
        two = group.create_task(second.turn())
        await asyncio.sleep(0.01)
        assert not one.done()
        other.token()
        await one
        assert not two.done()
        first.token()
        await two
        second.close()


async def test_who_leaves_keeps_nobody_waiting() -> None:
    trials = IsolationQueue()
    gone, waiting, suspect = (LossHistory(trials, name, max_losses=5) for name in "abc")
    for record in (waiting, suspect):
        for _ in range(2):
            await lose(record)
    await lose(gone)
    turn = asyncio.ensure_future(waiting.turn())
    await asyncio.sleep(0.01)
    turn.cancel()  # its client has gone, while it waited behind the other
    await asyncio.gather(turn, return_exceptions=True)
    waiting.close()
    gone.close()
    async with asyncio.timeout(5):
        await suspect.turn()
    suspect.close()
