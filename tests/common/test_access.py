"""Who may call a gRPC server: real servers and channels on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import pytest
from support.clients.http2_frames import (
    END_HEADERS,
    HEADERS,
    RST_STREAM,
    connection,
    frame,
    frames,
    head,
    send,
    stream_ids,
)
from surestep_common import access, rpc
from surestep_common.access import PeerSettings
from surestep_common.errors import Unauthenticated
from surestep_common.health_probe import HealthProbe
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import scheduler_pb2_grpc as pb_grpc

SECRET = "0123456789abcdef"
INFO = "/surestep.v1.Scheduler/Info"


class Answers(pb_grpc.SchedulerServicer):
    """Answers every question, and counts them."""

    def __init__(self) -> None:
        self.asked = 0

    async def Info(self, request: object, context: object) -> pb.SchedulerInfo:
        self.asked += 1
        return pb.SchedulerInfo(vocab_size=7)

    async def Generate(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateChunk]:
        self.asked += 1
        yield pb.GenerateChunk(token_ids=[1])


@contextlib.contextmanager
def knowing(secret: str | None) -> Iterator[None]:
    """As in a process with this secret."""
    token = access.secret.set(secret)
    try:
        yield
    finally:
        access.secret.reset(token)


@contextlib.asynccontextmanager
async def serving(
    service: Answers, secret: str | None, guests: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[str]:
    with knowing(secret):
        server = rpc.Server([], guests)
    pb_grpc.add_SchedulerServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(address: str, secret: str | None) -> tuple[int, int]:
    """What both kinds of calls answer. Raises Unauthenticated."""
    with knowing(secret):
        channel = rpc.connect(address)
    async with channel:
        stub = pb_grpc.SchedulerStub(channel)
        with rpc.translate_errors():
            info = await stub.Info(pb.SchedulerInfoRequest(), timeout=5)
            chunks = [chunk async for chunk in stub.Generate(pb.GenerateRequest(), timeout=5)]
    return info.vocab_size, len(chunks)


@pytest.mark.parametrize("ours", [None, SECRET])
async def test_who_knows_the_secret_is_served(ours: str | None) -> None:
    async with serving(Answers(), ours) as address:
        assert await ask(address, ours) == (7, 1)


@pytest.mark.parametrize("theirs", [None, SECRET + "x", SECRET[:-1], "fedcba9876543210"])
async def test_who_does_not_is_refused_unheard(theirs: str | None) -> None:
    service = Answers()
    async with serving(service, SECRET) as address:
        with pytest.raises(Unauthenticated, match="gRPC secret"):
            await ask(address, theirs)
        garbage = b"\xff" * 100  # would fail to parse, if anybody tried
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(INFO, bytes, bytes)(garbage, timeout=5)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.asked == 0


async def test_guests_are_let_in_where_they_are_expected() -> None:
    async with serving(Answers(), SECRET, {INFO: ["guest-1", "guest-2"]}) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = pb_grpc.SchedulerStub(channel)
            for key in ("guest-1", "guest-2"):
                metadata = (("authorization", f"Bearer {key}"),)
                await stub.Info(pb.SchedulerInfoRequest(), metadata=metadata, timeout=5)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await stub.Generate(pb.GenerateRequest(), metadata=metadata, timeout=5).read()
        assert await ask(address, SECRET) == (7, 1)


async def test_who_knows_the_secret_may_ask_for_signs_of_life_by_a_name_of_its_own() -> None:
    async with serving(Answers(), SECRET) as address:
        with knowing(SECRET):
            probe, name = HealthProbe(address), access.alive_method()
        async with probe, grpc.aio.insecure_channel(address) as channel:
            assert await probe.answers(5)
            assert name is not None
            assert SECRET not in name
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await channel.unary_unary(name, bytes, bytes)(b"", timeout=5)


async def test_what_nobody_serves_is_said_to_be_so_to_those_who_may_know() -> None:
    async with (
        serving(Answers(), SECRET) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = channel.unary_unary("/surestep.v1.Scheduler/NotYet", bytes, bytes)
        for key, code in (("x", "UNAUTHENTICATED"), (SECRET, "UNIMPLEMENTED")):
            with pytest.raises(grpc.aio.AioRpcError, match=code):
                await call(b"", metadata=(("authorization", f"Bearer {key}"),), timeout=5)


async def test_a_connection_has_so_many_streams() -> None:
    """Calls whose message does not come: gRPC refuses those over the bound by itself."""
    async with serving(Answers(), None) as address:
        assert await asyncio.to_thread(_refused, address, 200) == list(range(128 * 2 + 1, 401, 2))


def _refused(address: str, streams: int) -> list[int]:
    """Streams that are reset when so many are opened on a connection."""
    with connection(address) as end:
        opened = itertools.islice(stream_ids(), streams)
        send(end, b"".join(frame(HEADERS, END_HEADERS, s, head(INFO)) for s in opened), 5)
        came = list(frames(end, 1))
    return sorted(stream for kind, stream, _ in came if kind == RST_STREAM)


def test_a_secret_comes_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    assert PeerSettings.load(["--grpc-secret-file", str(path)]).read_grpc_secret() == SECRET
    monkeypatch.setenv("SURESTEP_GRPC_SECRET", SECRET)
    assert PeerSettings.load([]).read_grpc_secret() == SECRET
    assert PeerSettings.load([]).environ() == {"SURESTEP_GRPC_SECRET": SECRET}


@pytest.mark.parametrize("content", ["", "short", "two lines of\nsome length", "ééééééééééééééééé"])
def test_a_poor_secret_is_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(SystemExit):
        PeerSettings.load(["--grpc-secret-file", str(path)])
    assert f"{path} must hold" in (said := capsys.readouterr().err)
    assert not content or content not in said


def test_a_poor_secret_of_the_command_line_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        PeerSettings.load(["--grpc-secret", "hush"])
    assert "--grpc-secret must hold" in (said := capsys.readouterr().err)
    assert "hush" not in said


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        *(("127.0.0.1:1", False), ("[::1]:1", False), ("localhost:1", False)),
        *(("0.0.0.0:1", True), ("[::]:1", True), ("scheduler:1", True), ("10.0.0.1:1", True)),
    ],
)
def test_open_doors_to_a_network_are_told(
    caplog: pytest.LogCaptureFixture, address: str, warned: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        access.warn_if_exposed(address)
    assert ("takes calls from anyone" in caplog.text) == warned
    caplog.clear()
    with knowing(SECRET):
        access.warn_if_exposed(address)
    assert caplog.text == ""
