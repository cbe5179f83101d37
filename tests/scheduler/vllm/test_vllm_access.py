"""Who may call vllm.grpc.engine, and how far one open service opens the port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.clients.vllm_calls import MODEL, ask, tokens_of
from support.clients.vllm_wire import METHODS, WireClient, new
from support.fakes.worker import fake_worker
from support.processes.ports import free_address
from support.processes.scheduler_harness import (
    Client,
    code_of,
    make_request,
    make_settings,
    stub_of,
    trailing,
)
from surestep_common import access
from surestep_proto import scheduler_pb2 as pb
from surestep_scheduler import server

SECRET, GUEST = "s" * 32, "a guest's key"


@asynccontextmanager
async def closed(**changes: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of somebody who shows nothing to a scheduler with a secret and a guest."""
    address = changes.pop("scheduler_listen", free_address())
    token = access.secret.set(SECRET)
    try:
        async with fake_worker(MODEL) as worker:
            settings = make_settings(
                [worker],
                scheduler_listen=address,
                grpc_secret=SECRET,
                **{"grpc_api_key": [GUEST]} | changes,
            )
            async with server.running(settings), grpc.aio.insecure_channel(address) as channel:
                yield channel
    finally:
        access.secret.reset(token)


async def code(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    call = WireClient(channel).call(method, new(f"{method}Request"))
    return (await code_of(call.read() if hasattr(call, "read") else call)).code()


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_is_closed_to_strangers(method: str) -> None:
    async with closed() as channel:
        assert await code(channel, method) == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("key", [GUEST, SECRET])
async def test_a_key_opens_it(key: str) -> None:
    async with closed() as channel:
        await Client(stub_of(channel), channel).health()
        call = WireClient(channel).call("Generate", ask(), metadata=_bearer(key))
        responses = [response async for response in call]
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await WireClient(channel).call("HealthCheck", new("HealthCheckRequest"))
    assert list(responses[-1].complete.output_ids) == tokens_of()


def _bearer(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


async def test_public_opens_it_and_nothing_else() -> None:
    async with closed(vllm_grpc_public=True) as channel:
        wire, own = WireClient(channel), stub_of(channel)
        await Client(own, channel).health()
        answer = await wire.generate(ask())
        closed_ones = [
            await code_of(own.Info(pb.SchedulerInfoRequest())),
            await code_of(own.Stats(pb.StatsRequest())),
            await code_of(own.Status(pb.SchedulerStatusRequest())),
            await code_of(own.RestartWorkers(pb.RestartWorkersRequest())),
            await code_of(own.Generate(pb.GenerateRequest()).read()),
        ]
    assert list(answer.ends[0].output_ids) == tokens_of()
    assert {error.code() for error in closed_ones} == {grpc.StatusCode.UNAUTHENTICATED}


async def test_every_key_is_an_owner_of_prefixes_by_itself() -> None:
    """A key finds what it sent through either service, and nothing of others or of the gateway."""
    async with closed(grpc_api_key=[GUEST, "another's key"], vllm_grpc_public=True) as channel:
        await Client(stub_of(channel), channel).health()

        async def ours(key: str, number: int, **fields: Any) -> int:
            message = make_request(number, length=41)
            message.MergeFrom(pb.GenerateRequest(**fields))
            message.prompt_ids[:] = range(41)
            call = stub_of(channel).Generate(message, metadata=_bearer(key))
            first, *_ = [chunk async for chunk in call]
            return int(first.start.num_cached_tokens)

        async def theirs(number: int, metadata: Any) -> int:
            request = ask(str(number), max_tokens=1)
            request.tokenized.input_ids[:] = range(41)
            call = WireClient(channel).call("Generate", request, metadata=metadata)
            *_, last = [response async for response in call]
            return int(last.complete.cached_tokens)

        assert await ours(SECRET, 1) == 0
        assert await theirs(2, ()) == 40  # nobody with a key, as the gateway without keys
        assert await ours(GUEST, 3) == 0
        assert await ours("another's key", 4) == 0
        assert await theirs(5, _bearer(GUEST)) == 40
        assert await ours(SECRET, 6, cache_owner="a") == 0
        assert await ours(SECRET, 7, cache_owner="a") == 40
        refused = await code_of(ours(GUEST, 8, cache_owner="a"))
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(refused)["surestep-param"] == "cache_owner"


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_port_that_is_public_in_a_network_is_told_of(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with closed(vllm_grpc_public=True, scheduler_listen=f"{host}:0"):
        pass
    told = [record for record in caplog.records if "vllm.grpc.engine" in record.getMessage()]
    assert bool(told) == warned


async def test_streams_for_the_chunks_of_many_calls_are_not_for_guests() -> None:
    async with closed() as channel:
        await Client(stub_of(channel), channel).health()
        call = stub_of(channel).Deliver(
            pb.DeliverRequest(stream_id="mine"), metadata=_bearer(GUEST)
        )
        assert (await code_of(call.read())).code() == grpc.StatusCode.UNAUTHENTICATED
