"""Schedulers that come and leave at run time: who gets requests, and that no stream notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from support.fakes.scheduler import FakeScheduler, default_info, emulated, start, tokens
from support.patience import PATIENCE_S
from support.processes.gateway_stack import Events, Paused, Stack, StartStack
from surestep_common.errors import InvalidRequest
from surestep_gateway.schedulers import discovery, members
from surestep_proto.scheduler_pb2 import (
    LENGTH,
    GenerateChunk,
    GenerateRequest,
    SchedulerInfo,
    SchedulerStats,
)


class Fleet:
    """A gateway that has its schedulers from a file, and schedulers to name there."""

    def __init__(self, stack: Stack, path: Path) -> None:
        self.stack = stack
        self.all = stack.schedulers
        self._path = path

    def names(self, *listed: FakeScheduler | str) -> None:
        """Replace the file as a whole."""
        lines = [one if isinstance(one, str) else f"127.0.0.1:{one.port}" for one in listed]
        new = self._path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self._path)

    async def knows(self, *wanted: FakeScheduler, leaving: Iterable[FakeScheduler] = ()) -> None:
        """Wait until these are its schedulers, each admitted."""
        expected = {(f"127.0.0.1:{one.port}", one in leaving) for one in (*wanted, *leaving)}
        async with asyncio.timeout(PATIENCE_S):
            while True:
                shown = (await self.stack.client.get("/status")).json()["schedulers"]
                if {(one["url"], one["leaving"]) for one in shown if one["admits"]} == expected:
                    return
                await asyncio.sleep(0.01)

    async def asked(self, number: int = 8, **body: str) -> list[FakeScheduler]:
        """Send requests with prefixes of their own; who has got some?"""
        before = [len(one.requests) for one in self.all]
        for salt in range(number):
            answer = await self.stack.complete(max_tokens=2, cache_salt=str(salt), **body)
            assert answer.status_code == 200, answer.text
        return [one for one, had in zip(self.all, before, strict=True) if len(one.requests) > had]


@pytest.fixture
async def fleet(start_stack: StartStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Three schedulers, none of which is named yet."""
    monkeypatch.setattr(discovery, "RETRY_S", 0.01)
    monkeypatch.setattr(discovery, "_LONGEST_RETRY_S", 0.01)
    monkeypatch.setattr(members, "SWEEP_S", 0.02)
    path = tmp_path / "schedulers"
    stack = await start_stack(replicas=3, ready=False, scheduler_url=f"file://{path}")
    for scheduler in stack.schedulers:
        scheduler.info.model_fingerprint = "m"
    return Fleet(stack, path)


@pytest.mark.parametrize("dies", [False, True])
async def test_one_comes_and_another_leaves(fleet: Fleet, dies: bool) -> None:
    """Open streams go on where they are to their ends, or elsewhere if that one dies."""
    old, new, _ = fleet.all
    fleet.names(old)
    await fleet.knows(old)
    assert await fleet.asked() == [old]
    script = old.script = Paused(3)
    asked = {"prompt": "x", "max_tokens": 9, "seed": 4, "return_token_ids": True}
    async with fleet.stack.begun("/v1/completions", **asked) as rest:
        (request,) = old.requests[8:]
        fleet.names(new)
        await fleet.knows(new, leaving=[old])
        assert await fleet.asked() == [new]
        if dies:
            await old.stop()
        else:
            script.go.set()
        assert ids_of(await rest()) == emulated(request)
    await fleet.knows(new)
    assert len(new.requests) == 8 + dies
    assert len(fleet.stack.server.gateway.pool.schedulers) == 1


async def test_one_that_comes_gets_the_adapters_of_the_others(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """And no requests for one that it has not, before that or where it does not get it."""
    old, new, other = fleet.all
    old.add_adapter("legal", "/srv/legal", "of legal")
    new.restarting, other.load_fault = asyncio.Event(), InvalidRequest("another than before")
    fleet.names(old)
    await fleet.knows(old)
    fleet.names(old, new, other)
    await fleet.knows(old, new, other)
    async with asyncio.timeout(PATIENCE_S):
        while not new.loads:
            await asyncio.sleep(0.01)
        assert await fleet.asked(model="legal") == [old]
        assert new in await fleet.asked()
        new.restarting.set()
        while "lacks adapter 'legal' of the others: another than" not in caplog.text:
            await asyncio.sleep(0.01)
        assert await fleet.asked(16, model="legal") == [old, new]
    (load,) = new.loads
    assert (load.name, load.path, load.digest) == ("legal", "/srv/legal", "of legal")
    models = (await fleet.stack.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models][1:] == ["legal"]


def ids_of(events: Events) -> list[int]:
    assert events.done
    return [i for choice in events.choices() for i in choice.get("token_ids", ())]


async def test_the_last_one_is_kept(fleet: Fleet) -> None:
    """An empty list stops no service that goes on, and a service that is gone comes back."""
    one, other, _ = fleet.all
    assert "cannot read the file" in (await fleet.stack.client.get("/health/ready")).text
    fleet.names(one, "127.0.0.1:1")  # the second is stale
    await fleet.knows(one)
    fleet.names()
    await fleet.knows(leaving=[one])
    assert await fleet.asked() == [one]
    await one.stop()
    async with asyncio.timeout(PATIENCE_S):
        while fleet.stack.server.gateway.pool.schedulers:
            await asyncio.sleep(0.01)
    reply = await fleet.stack.client.get("/health/ready")
    assert reply.status_code == 503
    assert "there are none" in reply.text
    for path in ("/status", "/metrics", "/load", "/overview", "/v1/models"):
        assert (await fleet.stack.client.get(path)).status_code == 200, path
    async with asyncio.TaskGroup() as tasks:  # a request waits for one that comes
        waiting = tasks.create_task(fleet.asked(1))
        fleet.names(other)
    assert waiting.result() == [other]


@pytest.mark.parametrize(
    ("info", "trouble", "asked"),
    [
        (default_info(model_fingerprint="other"), "", 0),
        (default_info(model_fingerprint="m"), "no facts yet", 0),
        (default_info(), "", 8),  # an older release does not say
    ],
)
async def test_one_that_is_not_ours(
    fleet: Fleet, info: SchedulerInfo, trouble: str, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    ours, stranger, _ = fleet.all
    stranger.info, stranger.trouble = info, trouble
    fleet.names(ours)
    await fleet.knows(ours)
    assert await fleet.asked(1) == [ours]
    fleet.names(ours, stranger, fleet.stack.url.removeprefix("http://"))  # which speaks HTTP
    await stranger.until(lambda one: one.num_info > 1)
    await fleet.knows(ours, stranger)
    ours.stats = SchedulerStats(num_running=1000)
    await fleet.knows(ours, stranger)
    assert stranger in await fleet.asked() if asked else await fleet.asked() == [ours]
    told = [one for one in caplog.messages if "serves another model than the others" in one]
    assert len(told) == (info.model_fingerprint == "other")
    fleet.names(stranger)  # which now is all that is to serve
    stranger.trouble = ""
    async with asyncio.timeout(PATIENCE_S):
        while await fleet.asked(1) != [stranger]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.rotates(4)
async def test_lists_that_flap(fleet: Fleet, seed: int) -> None:
    """Whatever the file names, and whoever is lost meanwhile, every stream gets its tokens."""
    chance = random.Random(seed)
    for scheduler in fleet.all:
        scheduler.script = slowly
    fleet.names(*fleet.all)
    await fleet.knows(*fleet.all)
    over = asyncio.Event()

    async def flap() -> None:
        while not over.is_set():
            fleet.names(*chance.sample(fleet.all, chance.randint(0, 3)))
            if chance.random() < 0.3:
                victim = chance.choice(fleet.all)
                await victim.stop()
                await victim.start()
            await asyncio.sleep(0.03)

    async def ask(number: int) -> None:
        body = {"prompt": f"{number}", "max_tokens": 30, "seed": number, "return_token_ids": True}
        got = ids_of(await fleet.stack.stream("/v1/completions", **body))
        sent = [one for each in fleet.all for one in each.requests if one.sampling.seed == number]
        first = next(one for one in sent if not one.emitted_ids)
        assert got == emulated(first)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flap())
        async with asyncio.TaskGroup() as asks:
            for number in range(12):
                asks.create_task(ask(number))
        over.set()
    fleet.names(*fleet.all)
    await fleet.knows(*fleet.all)


async def slowly(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    yield start()
    ids = emulated(request)
    for token in ids[:-1]:
        yield tokens([token])
        await asyncio.sleep(0.02)
    yield tokens(ids[-1:], finish=LENGTH)


async def test_figures_keep_their_numbers(fleet: Fleet) -> None:
    first, second, third = fleet.all
    fleet.names(first, second)
    await fleet.knows(first, second)
    before = await numbers(fleet)
    gone, stays = sorted((first, second), key=lambda one: before[one.port])
    fleet.names(stays)
    await fleet.knows(stays)
    assert await numbers(fleet) == {stays.port: "1"}
    fleet.names(stays, third)
    await fleet.knows(stays, third)
    assert await numbers(fleet) == {stays.port: "1", third.port: "0"}
    assert before == {gone.port: "0", stays.port: "1"}


async def numbers(fleet: Fleet) -> dict[int, str]:
    """Label `engine` of each scheduler, by its port."""
    text = (await fleet.stack.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("surestep:slots_used{")]
    labels = [dict(part.split("=") for part in line[20:-5].split(",")) for line in lines]
    return {int(one["scheduler"][:-1].rpartition(":")[2]): one["engine"][1:-1] for one in labels}


@pytest.mark.parametrize(
    "stats",
    [SchedulerStats(num_running=90), SchedulerStats(num_waiting=64)],
    ids=["busy with requests of other gateways", "full"],
)
async def test_what_schedulers_report_counts(fleet: Fleet, stats: SchedulerStats) -> None:
    """A queue that is full is passed over even where its scheduler has the least to do."""
    one, other, _ = fleet.all
    fleet.names(one, other)
    await fleet.knows(one, other)
    assert sorted(await fleet.asked(16), key=id) == sorted([one, other], key=id)
    one.stats = stats
    if stats.num_waiting:
        other.stats = SchedulerStats(num_running=500)
    pool = fleet.stack.server.gateway.pool
    async with asyncio.timeout(PATIENCE_S):
        while {
            client.stats.num_running + client.stats.num_waiting for client in pool.schedulers
        } != {
            scheduler.stats.num_running + scheduler.stats.num_waiting for scheduler in (one, other)
        }:
            await asyncio.sleep(0.01)
    assert await fleet.asked() == [other]


async def test_an_order_to_one_that_leaves(fleet: Fleet) -> None:
    """A restart that waits for a scheduler ends when that one is gone for good."""
    one, other, _ = fleet.all
    fleet.names(one, other)
    await fleet.knows(one, other)
    pool = fleet.stack.server.gateway.pool
    (client,) = [c for c in pool.schedulers if c.address.endswith(f":{one.port}")]
    await one.set_serving(False)
    await fleet.knows(other)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_failure(pool.until_admits(client, PATIENCE_S)))
        fleet.names(other)
    assert f"scheduler 127.0.0.1:{one.port} has left" in waiting.result()
    assert f"scheduler 127.0.0.1:{one.port} has left" in await _failure(client.query_status())
    with pytest.raises(Exception, match="has left"), client.generate(GenerateRequest(), 1.0):
        pytest.fail("a call began")


async def _failure(asked: object) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await asked  # type: ignore[misc]
    return str(caught.value)
