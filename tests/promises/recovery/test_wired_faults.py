"""Faults that need more than one server's own processes: wires, clients, drains, two schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest
from support.faults.cases import SEED, Setup, adopted, nothing
from support.faults.run import Served, client_of, flags, model, run, served_by
from support.faults.server import SECRET, Facts, FaultyServer, serve_for_faults
from support.faults.streams import Answer, Tally, differences, mix, prefix_of, stream
from support.faults.wire import Wire
from support.processes.gateway import Process, gateway, until_ready
from support.processes.ports import free_port
from surestep_common import access
from surestep_common.rpc import connect
from surestep_proto import scheduler_pb2, scheduler_pb2_grpc

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotates(2)]
PLAIN = Setup("none", 1)
FREED_S = 5.0  # within 0.5 s where nothing else runs
MOST_OF_ONE = sum(ask.num_choices for ask in mix(random.Random(SEED)))  # sequences of a gateway
AT = 300  # tokens that all streams together have delivered before the fault


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """Start a second server of the same model, ended with its test."""
    folder = tmp_path_factory.mktemp("second")
    with serve_for_faults(model(PLAIN, folder), folder, *flags(PLAIN)) as server:
        yield server


class Front(NamedTuple):
    """A gateway beside the server's own."""

    url: str
    process: Process


@asynccontextmanager
async def gateway_to(served: Served, *schedulers: str, port: int = 0) -> AsyncIterator[Front]:
    """Start a gateway in front of `schedulers`, ended with the context."""
    port = port or free_port()
    flags = (
        *("--scheduler-url", ",".join(schedulers), "--grpc-secret", SECRET),
        *("--served-model-name", "tiny"),
    )
    async with gateway(served.model, port, 0, *flags) as process:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as client:
            await until_ready(client, process)
        yield Front(url, process)


@served_by(["none-tp1"])
@pytest.mark.parametrize("how", ["cut", "silence"])
def test_the_connection_between_gateway_and_scheduler(served: Served, how: str) -> None:
    async def streams() -> None:
        async with (
            Wire(scheduler_of(served.server)) as wire,
            gateway_to(served, wire.address) as front,
        ):
            answers = await run(front.url, served.asks, AT, getattr(wire, how))
            assert wire.num_cut > 0
            assert differences(served.expected, answers) == []

    asyncio.run(streams())
    served.server.recovered(served.holdings)


@served_by(["none-tp1"])
def test_clients_that_leave_take_nobody_with_them(served: Served) -> None:
    aborted = "surestep:aborted_requests_total"
    before = served.server.stack.metric(aborted)
    leaving = random.Random(SEED).sample(range(len(served.asks)), 5)
    asks = [ask.longer(600) if i in leaving else ask for i, ask in enumerate(served.asks)]

    async def streams() -> None:
        tally = Tally()
        async with client_of(served.server.stack.url) as client, asyncio.timeout(90):
            tasks = [asyncio.ensure_future(stream(client, ask, tally)) for ask in asks]
            await tally.reached(AT)
            for index in leaving:
                tasks[index].cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        stayed = [index for index in range(len(tasks)) if index not in leaving]
        assert all(isinstance(ends[index], asyncio.CancelledError) for index in leaving)
        expected = [served.expected[index] for index in stayed]
        assert differences(expected, [ends[index] for index in stayed]) == []  # type: ignore[misc]

    asyncio.run(streams())
    served.server.recovered(served.holdings)
    assert served.server.stack.metric(aborted) >= before + 5


@served_by(["none-tp1"])
@pytest.mark.parametrize("listed", [False, True])
def test_streams_move_to_the_other_scheduler(
    served: Served, second: FaultyServer, listed: bool, tmp_path: Path
) -> None:
    """Drain one of two schedulers: its open requests go on at the other, which may have come when
    they were open.
    """
    schedulers = scheduler_of(second), scheduler_of(served.server)
    file = tmp_path / "schedulers"
    file.write_text(schedulers[0])

    def drain() -> None:
        file.with_suffix(".new").write_text(schedulers[1])
        file.with_suffix(".new").rename(file)
        second.send(signal.SIGTERM, second.facts().scheduler_pid)

    async def streams() -> None:
        urls = [f"file://{file}"] if listed else schedulers
        async with gateway_to(served, *urls) as front:
            answers = await run(front.url, served.asks, AT, drain)
            assert differences(served.expected, answers) == []

    asyncio.run(streams())
    served.server.recovered(served.holdings)


@served_by(["none-tp1"])
def test_streams_leave_a_scheduler_without_workers(served: Served, second: FaultyServer) -> None:
    """Kill the rank of one of two schedulers and its supervisor, which nobody replaces."""
    facts = second.facts()
    schedulers = scheduler_of(second), scheduler_of(served.server)

    def lose() -> None:
        second.send(signal.SIGKILL, *facts.supervisor_pids, *facts.rank_pids)

    async def streams() -> None:
        async with gateway_to(served, *schedulers) as front:
            answers = await run(front.url, served.asks, AT, lose)
            assert differences(served.expected, answers) == []

    with second.stack.launcher_stopped():
        asyncio.run(streams())
    second.stack.wait_until(second.stack.is_ready, "its workers")
    served.server.recovered(served.holdings)


@served_by(["none-tp1"])
def test_a_gateway_that_is_killed_takes_only_its_own_streams(served: Served) -> None:
    """Sixteen streams through each of two; another takes the place of the one that ended."""

    async def streams() -> None:
        scheduler = scheduler_of(served.server)
        async with (
            gateway_to(served, scheduler) as doomed,
            gateway_to(served, scheduler) as other,
        ):
            others = asyncio.ensure_future(run(other.url, served.asks))
            await broken_off(served, doomed.url, doomed.process.pid)
            port = int(doomed.url.rpartition(":")[2])
            async with gateway_to(served, scheduler, port=port) as successor:
                again = await run(successor.url, served.asks)
            assert differences(served.expected, again) == []
            assert differences(served.expected, await others) == []

    asyncio.run(streams())
    served.server.recovered(served.holdings)


@served_by(["none-tp1"])
def test_gateways_are_restarted_one_after_the_other(served: Served) -> None:
    """Streams of one that is told to stop end whole; what is new goes to those that are ready."""

    async def streams() -> None:
        scheduler = scheduler_of(served.server)
        async with AsyncExitStack() as fronts:
            first, second = [
                await fronts.enter_async_context(gateway_to(served, scheduler)) for _ in range(2)
            ]
            for leaving, staying in ((first, second), (second, first)):
                async with asyncio.TaskGroup() as tasks:
                    old = tasks.create_task(through_its_end(served, leaving))
                    new = tasks.create_task(run(staying.url, served.asks))
                assert differences(served.expected, old.result()) == []
                assert differences(served.expected, new.result()) == []
                assert await asyncio.wait_for(leaving.process.wait(), 30) == 0
                port = int(leaving.url.rpartition(":")[2])
                await fronts.enter_async_context(gateway_to(served, scheduler, port=port))
            answers = await run(first.url, served.asks)
            assert differences(served.expected, answers) == []

    asyncio.run(streams())
    served.server.recovered(served.holdings)


async def through_its_end(served: Served, front: Front) -> list[Answer]:
    """Answers through a gateway that is told to stop when all of them have begun."""
    tally, parts = Tally(), [Answer.of(ask) for ask in served.asks]
    async with (
        client_of(front.url) as client,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        for ask, part in zip(served.asks, parts, strict=True):
            tasks.create_task(stream(client, ask, tally, part))
        await begun(parts, tally)
        front.process.send_signal(signal.SIGTERM)
    return parts


async def begun(parts: Sequence[Answer], tally: Tally) -> None:
    """Wait until each has something: a request that is still on its way may be refused."""
    while not all(part.times[1:] for part in parts):
        await tally.reached(tally.tokens + 1)


@served_by(["none-tp1"])
def test_the_gateway_of_a_server_is_killed_and_replaced(served: Served) -> None:
    stack, before = served.server.stack, served.server.facts()
    asyncio.run(broken_off(served, stack.url, stack.status()["gateway"]["pid"]))
    stack.wait_until(stack.is_ready, "another gateway", 20)
    answers = asyncio.run(run(stack.url, served.asks))
    assert differences(served.expected, answers) == []
    assert served.server.facts() == before, "the gateway's end is nobody else's"
    served.server.recovered(served.holdings)


async def broken_off(served: Served, url: str, pid: int) -> None:
    """Kill a gateway in the midst of sixteen streams: each breaks, what they held is free at once."""
    access.secret.set(SECRET)  # of this task
    tally, address = Tally(), scheduler_of(served.server)
    parts = [Answer.of(ask) for ask in served.asks]
    async with client_of(url) as client, asyncio.timeout(60):
        tasks = [
            asyncio.ensure_future(stream(client, ask, tally, part))
            for ask, part in zip(served.asks, parts, strict=True)
        ]
        await tally.reached(AT)
        served.server.send(signal.SIGKILL, pid)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {openai.APIConnectionError}
        assert all(map(prefix_of, parts, served.expected))
        async with asyncio.timeout(FREED_S), connect(address) as channel:
            scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            while held(await scheduler.Stats(scheduler_pb2.StatsRequest())) > MOST_OF_ONE:
                await asyncio.sleep(0.02)


def held(stats: scheduler_pb2.SchedulerStats) -> int:
    """Sequences that a scheduler runs or has waiting."""
    return stats.num_running + stats.num_waiting


@served_by(["none-tp1"])
def test_a_server_that_is_told_to_stop_finishes_first(served: Served, second: FaultyServer) -> None:
    """Open streams end as ever, new requests are told to come again, the exit status is 0."""

    asks = mix(random.Random(SEED), count=8, max_tokens=600)
    expected = asyncio.run(run(served.server.stack.url, asks))
    stack = second.stack

    async def streams() -> None:
        tally, parts = Tally(), [Answer.of(ask) for ask in asks]
        async with (
            client_of(stack.url) as client,
            asyncio.timeout(90),
            asyncio.TaskGroup() as tasks,
        ):
            for ask, part in zip(asks, parts, strict=True):
                tasks.create_task(stream(client, ask, tally, part))
            await begun(parts, tally)
            stack.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(stack.wait_until, lambda: not stack.is_ready(), "drain", 20)
            with pytest.raises(openai.APIStatusError) as refusal:
                await stream(client, served.asks[-1], Tally())
        assert refusal.value.status_code == 503
        assert float(refusal.value.response.headers["retry-after"]) >= 0
        assert differences(expected, parts) == []

    asyncio.run(streams())
    assert stack.process.wait(30) == 0


def _is_adopted(server: FaultyServer, before: Facts) -> bool:
    with contextlib.suppress(IndexError):  # no supervisor answers
        return adopted(before, server.facts())
    return False


def _loads(server: FaultyServer) -> int:
    """Return how often weights were read from the model's folder."""
    return (server.stack.logs / "worker0.log").read_text().count("loading weights: 0 of")


def scheduler_of(server: FaultyServer) -> str:
    """host:port."""
    address: str = server.stack.scheduler()["address"]
    return address


@served_by(["none-tp1"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_without_its_supervisor(served: Served, hangs: bool) -> None:
    """The next supervisor adopts it with its weights, or ends it if it does not say who it is."""
    server, before = served.server, served.server.facts()
    loads = _loads(server)

    def lose_both() -> None:
        (rank,), (supervisor,) = before.rank_pids, before.supervisor_pids
        if hangs:
            server.send(signal.SIGSTOP, rank)
        server.send(signal.SIGKILL, supervisor)  # before it sees that the rank hangs
        if not hangs:
            server.stack.wait_until(lambda: _is_adopted(server, before), "adoption", 30)
            server.send(signal.SIGKILL, rank)

    answers = asyncio.run(run(server.stack.url, served.asks, AT, lose_both))
    assert differences(served.expected, answers) == []
    server.recovered(served.holdings)
    assert before.rank_pids != server.facts().rank_pids
    assert (_loads(server) > loads) == hangs


@pytest.mark.rotates(3)
def test_a_rank_that_no_supervisor_comes_for_ends(second: FaultyServer) -> None:
    stack, facts = second.stack, second.facts()
    (rank,), (supervisor,) = facts.rank_pids, facts.supervisor_pids
    with stack.launcher_stopped():
        second.send(signal.SIGKILL, supervisor)
        psutil.wait_procs([psutil.Process(rank)], timeout=20)
        assert not psutil.pid_exists(rank)
    stack.wait_until(stack.is_ready, "readiness")


@served_by(["none-tp1"])
def test_a_busy_machine_is_no_fault(served: Served) -> None:
    """Ranks that get a twentieth of a core are late, and none is taken for hung."""
    before = served.server.facts()
    with ExitStack() as stack:
        for _ in range(20):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        answers = asyncio.run(run(served.server.stack.url, served.asks))
    assert differences(served.expected, answers) == []
    served.server.recovered(served.holdings)
    after = served.server.facts()
    assert nothing(before, after)
    assert after.since(before) == []
