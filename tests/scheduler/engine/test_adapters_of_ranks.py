"""Adapters on several ranks: on all or none, and in line when ranks or a scheduler come anew."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from surestep_common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    QueueFull,
    Unavailable,
)
from surestep_proto import scheduler_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.sequence import Adapter
from surestep_scheduler.engine import operations
from surestep_scheduler.engine.adapters import Adapters, PlacesTaken
from surestep_scheduler.engine.workers import WorkerGroup

PLACES = 2


class Stub:
    """A rank whose folders hold what their names say."""

    def __init__(self) -> None:
        self.held: dict[int, pb.Adapter] = {}
        self.fault: Exception | None = None
        self.digest = "digest of {}"

    async def LoadAdapter(self, wanted: pb.Adapter, timeout: float) -> pb.Adapter:
        if self.fault is not None:
            raise self.fault
        if "missing" in wanted.path:
            raise NotFound("there is none")
        if wanted.only_check:
            return wanted
        loaded = pb.Adapter()
        loaded.CopyFrom(wanted)
        loaded.digest = self.digest.format(wanted.path)
        if wanted.digest not in ("", loaded.digest):
            raise InvalidRequest("another adapter than before")
        self.held[wanted.place] = loaded
        return loaded

    async def UnloadAdapter(self, adapter: pb.Adapter, timeout: float) -> pb.UnloadAdapterResponse:
        self.held.pop(adapter.place, None)
        return pb.UnloadAdapterResponse()

    @property
    def info(self) -> pb.WorkerInfo:
        return pb.WorkerInfo(max_loras=PLACES, adapters=self.held.values())


class Ranks:
    """Two ranks and the group of them."""

    def __init__(self) -> None:
        self.stubs = [Stub(), Stub()]
        self.group: Any = WorkerGroup([])
        self.group._stubs = self.stubs

    async def settle(self, adapters: Adapters) -> list[str]:
        infos = [stub.info for stub in self.stubs]
        return [adapter.name for adapter in await adapters.settle(self.group, infos)]

    @property
    def names(self) -> list[list[str]]:
        return [[one.name for _, one in sorted(stub.held.items())] for stub in self.stubs]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def idle(adapter: object) -> bool:
    return False


async def load(
    adapters: Adapters, ranks: Ranks, name: str, *, in_place: bool = False
) -> pb.Adapter:
    return await adapters.load(ranks.group, name, f"/{name}", idle, in_place=in_place)


async def test_a_load_is_on_all_ranks_or_none(ranks: Ranks) -> None:
    adapters = Adapters({"a": "/a"})
    assert await ranks.settle(adapters) == []
    assert ranks.names == [["a"], ["a"]]
    ranks.stubs[1].fault = InvalidRequest("does not fit")
    with pytest.raises(InvalidRequest, match="does not fit"):
        await load(adapters, ranks, "b")
    ranks.stubs[1].fault, ranks.stubs[1].digest = None, "another of {}"
    with pytest.raises(InvalidRequest, match="different"):
        await load(adapters, ranks, "b")
    ranks.stubs[1].digest = "digest of {}"
    how: Any = {"in_place": False, "digest": "of another scheduler's"}
    with pytest.raises(InvalidRequest, match="another adapter"):
        await adapters.load(ranks.group, "b", "/b", idle, **how)
    assert ranks.names == [["a"], ["a"]]
    with pytest.raises(ModelNotFound):
        adapters.find("b")


async def test_a_place_is_free_when_no_request_has_it(ranks: Ranks) -> None:
    adapters = Adapters({"a": "/a"})
    await ranks.settle(adapters)
    old = adapters.find("a")
    await load(adapters, ranks, "a", in_place=True)
    assert adapters.find("a") != old
    adapters.check(old)
    with pytest.raises(QueueFull, match="places"):
        await load(adapters, ranks, "b")
    await adapters.sweep(ranks.group, lambda adapter: adapter == old)
    adapters.check(old)
    await adapters.sweep(ranks.group, lambda adapter: False)
    with pytest.raises(ModelNotFound, match="unloaded"):
        adapters.check(old)
    await load(adapters, ranks, "b")
    assert ranks.names == [["b", "a"], ["b", "a"]]


async def test_ranks_that_come_anew_are_brought_in_line(ranks: Ranks) -> None:
    adapters = Adapters({"a": "/a", "b": "/b"})
    await ranks.settle(adapters)
    ranks.stubs[1].held.clear()
    assert await ranks.settle(adapters) == []
    assert ranks.names == [["a", "b"], ["a", "b"]]
    for stub in ranks.stubs:
        stub.held.pop(0)
        stub.digest = "changed {}"
    assert await ranks.settle(adapters) == ["a"]
    assert ranks.names == [["b"], ["b"]]


async def test_a_scheduler_that_comes_anew_takes_what_all_ranks_have(ranks: Ranks) -> None:
    await ranks.settle(Adapters({"a": "/a", "b": "/b"}))
    ranks.stubs[0].held.pop(1)
    adapters = Adapters({"a": "/a"})
    assert await ranks.settle(adapters) == []
    assert ranks.names == [["a"], ["a"]]
    assert [one.name for one in adapters.loaded] == ["a"]


async def test_the_idle_adapter_that_was_named_longest_ago_makes_room(ranks: Ranks) -> None:
    adapters = Adapters({}, "/folder")
    await ranks.settle(adapters)

    async def named(name: str, in_use: Any = idle) -> Adapter:
        found = await adapters.resolve(ranks.group, name, in_use)
        assert found is not None
        return found

    a, b = await named("a"), await named("b")
    assert await named("a") == a
    for name in ("missing", "../a", ".a", "a/b"):
        with pytest.raises(ModelNotFound, match=f"'{name}' does not exist"):
            await named(name)
    ranks.stubs[1].fault = InvalidRequest("rank 9, more than 8")
    with pytest.raises(InvalidRequest, match="adapter 'c': rank 9"):
        await named("c")
    ranks.stubs[1].fault = None
    assert ranks.names == [["a", "b"], ["a", "b"]]  # nothing has made room for them
    await asyncio.gather(named("c"), named("c"))
    assert ranks.names == [["a", "c"], ["a", "c"]]
    with adapters.called(a):
        assert (await named("b")).place == b.place
        assert ranks.names == [["a", "b"], ["a", "b"]]
        with pytest.raises(QueueFull):
            await named("c", lambda adapter: adapter.name == "b")
    await load(adapters, ranks, "d")
    assert ranks.names == [["d", "b"], ["d", "b"]]
    await named("a")
    assert ranks.names == [["d", "a"], ["d", "a"]]  # what was loaded by hand stays
    assert await adapters.resolve(None, "", idle) is None
    with pytest.raises(Unavailable):
        await adapters.resolve(None, "b", idle)


class Line:
    """Requests that name adapters of a folder, one after the other; at most three may wait."""

    def __init__(self, ranks: Ranks) -> None:
        self.adapters = Adapters({}, "/folder")
        self.engine: Any = SimpleNamespace(
            adapters=self.adapters,
            group=ranks.group,
            state=None,
            clock=time.monotonic,
            limits=SimpleNamespace(max_queue_len=3),
            engine_state=scheduler_pb2.SERVING,
        )

        self.running: list[str] = []
        self.ends = defaultdict[str, asyncio.Event](asyncio.Event)  # of those with an adapter

    async def answer(self, name: str, within_s: float = 60.0, tenant: str = "") -> None:
        deadline = time.monotonic() + within_s
        adapter = await operations.find_adapter(self.engine, name, tenant, deadline)
        with self.adapters.called(adapter):
            self.running.append(name)
            await self.ends[name].wait()
            self.running.remove(name)

    async def begun(self, name: str, **how: Any) -> asyncio.Task[None]:
        """A request that runs now, or waits in line."""
        open_before = self.adapters.num_waiting + len(self.running)
        task = asyncio.create_task(self.answer(name, **how))
        while not task.done() and self.adapters.num_waiting + len(self.running) == open_before:
            await asyncio.sleep(0)
        return task

    async def runs(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while self.running != [*names]:
                await asyncio.sleep(0.001)


async def test_requests_wait_in_line_for_a_place(ranks: Ranks) -> None:
    line = Line(ranks)
    await ranks.settle(line.adapters)
    tasks = [await line.begun(name) for name in "abcc"]
    late = await line.begun("d", within_s=0.05)
    for name, error in (("e", PlacesTaken), ("missing", ModelNotFound)):
        with pytest.raises(error):
            await (await line.begun(name))
    with pytest.raises(DeadlineExceeded):
        await late
    tasks.append(await line.begun("e"))
    tasks.append(await line.begun("a"))  # which does not wait behind them
    assert line.running == ["a", "b", "a"]
    line.ends["a"].set()
    await line.runs("b", "c", "c")
    gone = await line.begun("d")
    gone.cancel()
    line.ends["c"].set()
    await line.runs("b", "e")
    assert ranks.names == [["e", "b"], ["e", "b"]]
    assert not line.adapters.num_waiting
    for name in "be":
        line.ends[name].set()
    await asyncio.gather(*tasks)


async def test_no_tenant_takes_the_whole_line(ranks: Ranks) -> None:
    line = Line(ranks)
    await ranks.settle(line.adapters)
    tasks = [await line.begun(name, tenant="greedy") for name in "abccc"]
    with pytest.raises(PlacesTaken):
        await (await line.begun("d", tenant="greedy"))
    tasks.append(await line.begun("d", tenant="modest"))
    assert line.adapters.num_waiting == 4
    with pytest.raises(PlacesTaken):
        await (await line.begun("e", tenant="modest"))
    for task in tasks:
        task.cancel()


async def test_a_draining_scheduler_hands_back_what_waits(ranks: Ranks) -> None:
    line = Line(ranks)
    await ranks.settle(line.adapters)
    *running, c, d = [await line.begun(name) for name in "abcd"]
    line.engine.engine_state = scheduler_pb2.DRAINING
    for task in (c, d):
        with pytest.raises(Unavailable, match="shutting down"):
            await task
    assert line.running == ["a", "b"]
    for task in running:
        task.cancel()


async def test_what_cannot_be_asked_for_is_refused(ranks: Ranks) -> None:
    adapters = Adapters({})
    with pytest.raises(InvalidRequest, match="--enable-lora"):
        await load(adapters, ranks, "a")
    await ranks.settle(adapters)
    with pytest.raises(Unavailable):
        await adapters.load(None, "a", "/a", idle, in_place=False)
    for name in ("", "a,b", "a\nb", "x" * 300):
        with pytest.raises(InvalidRequest):
            await load(adapters, ranks, name)
    with pytest.raises(InvalidRequest, match="--max-loras 2"):
        await ranks.settle(Adapters(dict.fromkeys("abc", "/x")))
    with pytest.raises(ModelNotFound):
        adapters.unload("a")
