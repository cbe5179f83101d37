"""What a neighbour on the same machine or network may call."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.processes.commands import command
from support.processes.ports import free_port
from support.processes.stack import Stack, serve
from surestep_proto import (
    sampling_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    supervisor_pb2,
    vllm_engine_pb2,
    worker_pb2,
)

API_KEY, ADMIN_KEY, GRPC_KEY = "key-of-a-client", "key-of-an-operator", "key-of-a-grpc-client"
_FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "0.01")
_TIMEOUT_S = 10
_SERVING = health_pb2.HealthCheckResponse.SERVING
_FOR_CLIENTS = {"Generate", "Info"}
_METHODS = [
    method
    for module in (scheduler_pb2, supervisor_pb2, vllm_engine_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


class Served(NamedTuple):
    """A running server and its gRPC addresses, by the service that is there."""

    stack: Stack
    addresses: dict[str, str]
    secret: str


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys, admin = folder / "keys", folder / "admin"
    keys.write_text(f"# of clients\n{API_KEY} name=someone weight=2 priority=yes\n")
    admin.write_text(ADMIN_KEY + "\n")
    flags = (
        *("--api-key-file", str(keys), "--admin-api-key-file", str(admin), "--protect-metrics"),
        *("--grpc-api-key", GRPC_KEY),
    )
    with serve(tiny_model, folder / "logs", *_FLAGS, *flags) as stack:
        headers = {"authorization": f"Bearer {API_KEY}"}
        status = httpx.get(stack.url + "/status", headers=headers, timeout=_TIMEOUT_S).json()
        scheduler = status["schedulers"][0]["status"]
        addresses = {
            "Scheduler": scheduler["address"],
            "VllmEngine": scheduler["address"],
            "Supervisor": scheduler["supervisors"][0]["address"],
            "Worker": scheduler["supervisors"][0]["rank_address"],
        }
        gateway = psutil.Process(status["gateway"]["pid"])
        yield Served(stack, addresses, gateway.environ()["SURESTEP_GRPC_SECRET"])


def call(address: str, method: MethodDescriptor, key: str | None) -> grpc.StatusCode:
    """The status of a call with an empty message."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    metadata = () if key is None else (("authorization", key),)
    with grpc.insecure_channel(address) as channel:
        replies: Any  # stub types know no calls without serialisers
        if method.client_streaming:
            start = channel.stream_stream(path, bytes, bytes)
            replies = start(iter([b""]), metadata=metadata, timeout=_TIMEOUT_S)
        else:
            ask = channel.unary_stream(path, bytes, bytes)
            replies = ask(b"", metadata=metadata, timeout=_TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            list(replies)
        code: grpc.StatusCode = replies.code()
    return code


@pytest.mark.parametrize("method", _METHODS, ids=lambda m: m.full_name)
@pytest.mark.parametrize(
    "key",
    [None, "Bearer", "Bearer ", f"Bearer {API_KEY}", f"Bearer {ADMIN_KEY}", f"Basic {GRPC_KEY}"],
)
def test_no_method_is_open_to_strangers(
    served: Served, method: MethodDescriptor, key: str | None
) -> None:
    address = served.addresses[method.containing_service.name]
    assert call(address, method, key) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", _METHODS, ids=lambda m: m.full_name)
def test_a_client_of_grpc_may_generate_and_no_more(
    served: Served, method: MethodDescriptor
) -> None:
    service = method.containing_service.name
    code = call(served.addresses[service], method, f"Bearer {GRPC_KEY}")
    admitted = service == "VllmEngine" or (service == "Scheduler" and method.name in _FOR_CLIENTS)
    assert (code is grpc.StatusCode.UNAUTHENTICATED) != admitted


def test_a_client_of_grpc_gets_tokens(served: Served) -> None:
    request = scheduler_pb2.GenerateRequest(
        request_id="mine",
        prompt_ids=[5, 6, 7],
        max_tokens=3,
        sampling=sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1),
    )
    metadata = (("authorization", f"Bearer {GRPC_KEY}"),)
    with grpc.insecure_channel(served.addresses["Scheduler"]) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        chunks = list(stub.Generate(request, metadata=metadata, timeout=_TIMEOUT_S))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 3


def test_who_knows_the_secret_is_served(served: Served) -> None:
    """So the refusals above are about nothing else."""
    for method in _METHODS:
        address = served.addresses[method.containing_service.name]
        if method.name not in ("RestartWorkers", "Restart"):
            code = call(address, method, f"Bearer {served.secret}")
            assert code is not grpc.StatusCode.UNAUTHENTICATED, method.full_name


@pytest.mark.parametrize("service", ["Scheduler", "Supervisor", "Worker"])
def test_health_is_open_and_reflection_is_not(served: Served, service: str) -> None:
    with grpc.insecure_channel(served.addresses[service]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            next(reflection.ServerReflectionInfo(iter([question]), timeout=_TIMEOUT_S))


def test_every_open_port_is_one_of_these(served: Served) -> None:
    """Whoever opens another one has to say whom it admits."""
    launcher = psutil.Process(served.stack.process.pid)
    listening = {
        f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"
        for process in [launcher, *launcher.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {served.stack.url.removeprefix("http://")}


def test_services_talk_over_sockets_that_other_users_do_not_reach(served: Served) -> None:
    """So that whoever waits for the port of a service that ended is not told the secret."""
    folders = {Path(address.removeprefix("unix:")).parent for address in served.addresses.values()}
    (folder,) = folders
    about = folder.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid) == (0o700, os.getuid())


_BYTES, _CALLERS = 60 << 20, 10
_MESSAGES = {
    "Worker": ("/surestep.v1.Worker/Info", "/surestep.v1.Worker/Compile"),
    "Supervisor": ("/surestep.v1.Supervisor/Restart",),
    "Scheduler": ("/surestep.v1.Scheduler/Generate",),
}
_HEALTH = "/grpc.health.v1.Health/Check"


@pytest.mark.timeout(200)
def test_what_strangers_send_is_not_received(tiny_model: Path, tmp_path: Path) -> None:
    """Ten of them at every port, where there are ports: others' tokens come all the while."""
    ports = {name: f"127.0.0.1:{free_port()}" for name in _MESSAGES}
    listen = [part for name in ports for part in (f"--{name.lower()}-listen", ports[name])]
    with serve(tiny_model, tmp_path, *_FLAGS, *listen) as stack:
        supervisor = stack.scheduler()["supervisors"][0]
        pids = supervisor["pid"], supervisor["rank_pid"], stack.scheduler()["pid"]
        processes = list(map(psutil.Process, pids))
        before = [process.memory_info().rss for process in processes]
        most = list(before)
        with ThreadPoolExecutor(64) as pool:
            floods = [
                pool.submit(_flood, ports[name], path)
                for name, paths in _MESSAGES.items()
                for path in (*paths, _HEALTH)
                for _ in range(_CALLERS)
            ]
            gaps = list[float]()
            while not all(flood.done() for flood in floods):
                began = time.monotonic()
                assert _one_token(stack) == 200
                gaps.append(time.monotonic() - began)
                now = [process.memory_info().rss for process in processes]
                most = list(map(max, most, now))
        codes = Counter(flood.result() for flood in floods)
        assert stack.scheduler()["supervisors"][0]["rank_pid"] == supervisor["rank_pid"]
    grown = [(high - low) >> 20 for high, low in zip(most, before, strict=True)]
    assert set(codes) <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.UNAUTHENTICATED] == 4 * _CALLERS
    assert max(grown) < 40, f"MiB: {grown}"
    assert max(gaps) < 10, "as long as a busy machine may take"


def _flood(address: str, path: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(path, bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(_BYTES), timeout=60)
        code: grpc.StatusCode = caught.value.code()
    return code


def _one_token(stack: Stack) -> int:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1}
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).status_code


@pytest.mark.timeout(100)
def test_health_checks_of_strangers_are_few_at_a_time(served: Served) -> None:
    """Those that begin a message and never end it included: others are told so, and ask again."""
    address = served.addresses["Worker"]
    with contextlib.ExitStack() as stack:
        watched = [stack.enter_context(grpc.insecure_channel(address)) for _ in range(80)]
        asked = health_pb2.HealthCheckRequest()
        streams = [health_pb2_grpc.HealthStub(c).Watch(asked, timeout=60) for c in watched]
        codes = Counter[str]()
        for stream in streams:
            try:
                next(stream)
                codes["watches"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
        assert codes == {"watches": 64, "RESOURCE_EXHAUSTED": 16}
        secret = (("authorization", f"Bearer {served.secret}"),)
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(asked, metadata=secret, timeout=_TIMEOUT_S).status == _SERVING
        for stream in streams:
            stream.cancel()


def test_who_begins_a_health_check_and_says_nothing_does_not_keep_others_out(
    served: Served,
) -> None:
    def never() -> Iterator[bytes]:
        over.wait()
        yield from ()

    def check(asks: Iterator[bytes]) -> Any:
        channel = stack.enter_context(grpc.insecure_channel(address))
        return channel.stream_stream(_HEALTH, bytes, bytes)(asks, timeout=30)

    address, over = served.addresses["Worker"], threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(over.set)
        silent = [check(never()) for _ in range(8)]
        codes = Counter(call.code().name for call in silent)  # of those that were heard, after 2 s
        assert codes == {"DEADLINE_EXCEEDED": 4, "RESOURCE_EXHAUSTED": 4}
        assert len(list(check(iter([b""])))) == 1


def test_keys_are_shown_to_nobody(served: Served) -> None:
    """Neither on the screen, nor in the logs, nor in the list of processes."""
    launcher = psutil.Process(served.stack.process.pid)
    commands = [command(p) for p in launcher.children(recursive=True)]
    logs = [path.read_text() for path in served.stack.logs.rglob("*.log")]
    assert commands
    assert logs
    for secret in (API_KEY, ADMIN_KEY, GRPC_KEY, served.secret):
        assert [text for text in (*commands, *logs) if secret in text] == []


_HTTP = {
    "/health": "nobody",
    "/health/ready": "nobody",
    "/ping": "nobody",
    "/version": "nobody",
    "/openapi.json": "nobody",
    "/v1/models": "client",
    "/v1/models/tiny": "client",
    "/tokenize": "client",
    "/detokenize": "client",
    "/v1/chat/completions": "client",
    "/v1/completions": "client",
    "/": "operator",
    "/docs": "operator",
    "/status": "operator",
    "/overview": "operator",
    "/ui": "nobody",
    "/ui/app.js": "nobody",
    "/metrics": "operator",
    "/load": "operator",
    "/admin/workers/restart": "admin",
    "/no/such/path": "client",
}
_OPENED_BY = {
    None: {"nobody"},
    API_KEY: {"nobody", "client", "operator"},
    ADMIN_KEY: {"nobody", "operator", "admin"},
    GRPC_KEY: {"nobody"},
}


@pytest.mark.parametrize("path", _HTTP)
@pytest.mark.parametrize("key", _OPENED_BY)
def test_keys_open_what_they_are_for(served: Served, path: str, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    # A method that no endpoint has: nothing is done where the key is right.
    method = "GET" if path in ("/", "/docs", "/status", "/metrics", "/load") else "PUT"
    reply = httpx.request(method, served.stack.url + path, headers=headers, timeout=_TIMEOUT_S)
    if path == "/admin/workers/restart":  # asks for its key when it is called as it should be
        body = b"no JSON"
        reply = httpx.post(served.stack.url + path, headers=headers, content=body)
    assert (reply.status_code == 401) == (_HTTP[path] not in _OPENED_BY[key])
