"""Places that keep lists of schedulers: what is found there, and what a place in trouble changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.fakes.directories import KubernetesApi, endpoint_slice, name_server
from support.patience import PATIENCE_S
from surestep_gateway.schedulers import discovery, endpoint_slices
from surestep_gateway.schedulers.discovery import Discovery
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.scheduler_urls import place

Lists = list[Collection[str]]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry = {"RETRY_S": 0.01, "_LONGEST_RETRY_S": 0.05, "DNS_EVERY_S": 0.01, "_DNS_S": 0.5}
    for name, seconds in hurry.items():
        monkeypatch.setattr(discovery, name, seconds)
    monkeypatch.setattr(endpoint_slices, "_PAUSE_S", 0.01)


class Followed:
    """A place that is followed, and all that was found there, one list after the other."""

    def __init__(self, url: str) -> None:
        found = place(url)
        assert found is not None
        self.lists: Lists = []
        self.discovery = Discovery(url, found, self.lists.append)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def finds(self, *addresses: str) -> None:
        """Wait until the last list is this one, and nothing is wrong."""
        await self.until(lambda: self.lists[-1:] == [list(addresses)])
        if addresses:
            await self.until(lambda: not self.discovery.trouble)

    async def troubled(self, text: str) -> None:
        """Wait for a trouble, which leaves the last list as it is."""
        before = list(self.lists)
        await self.until(lambda: text in self.discovery.trouble)
        assert self.lists == before


@contextlib.asynccontextmanager
async def following(url: str) -> AsyncIterator[Followed]:
    followed = Followed(url)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(followed.discovery.run())
        try:
            yield followed
        finally:
            task.cancel()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("dns://name", "must be dns://NAME:PORT"),
        ("dns://name:0", "must be dns://NAME:PORT"),
        ("dns://na me:1", "must be dns://NAME:PORT"),
        ("dns://resolver/name:1", "must be dns://NAME:PORT"),
        (f"dns://{'n' * 64}:1", "must be dns://NAME:PORT"),
        ("dns+srv://name:1", r"must be dns\+srv://NAME"),
        ("file://name", "must be file:///PATH"),
        ("file:///", "must be file:///PATH"),
        ("file:///a%00b", "must be file:///PATH"),
        ("k8s://space", "must be k8s://NAMESPACE/SERVICE"),
        ("k8s://space/Service", "must be k8s://NAMESPACE/SERVICE"),
        ("k8s://space/service/more", "must be k8s://NAMESPACE/SERVICE"),
        ("k8s://space/service", "which have KUBERNETES_SERVICE_HOST"),
        ("http://name:1", "must be host:port"),
    ],
)
def test_places_that_are_none(
    url: str, reason: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValidationError, match=reason):
        GatewaySettings.model_validate({"model": model, "scheduler_url": [url]})


def test_the_package_for_dns_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"pip install 'surestep\[dns\]'"):
        GatewaySettings.model_validate({"model": model, "scheduler_url": ["dns://name:1"]})


async def test_addresses_of_a_name() -> None:
    async with name_server() as server:
        server.records = {("pods.x", "A"): ["10.0.0.2", "10.0.0.1"]}
        async with following(f"dns://{server.address}/pods.x:50051") as found:
            await found.finds("10.0.0.1:50051", "10.0.0.2:50051")
            server.fault, records = "SERVFAIL", server.records
            server.records = {}
            await found.troubled("All nameservers failed")
            server.fault = "silent"
            await found.troubled("no name server answers")
            server.fault, server.records = "", records | {("pods.x", "AAAA"): ["::1"]}
            await found.finds("10.0.0.1:50051", "10.0.0.2:50051")
            server.records = {("pods.x", "AAAA"): ["::1"]}
            await found.finds("[::1]:50051")
            server.records = {}
            await found.finds()
            assert "there are none" in found.discovery.trouble
        asked = server.num_asked
        assert asked < 500, "asked without a pause"


async def test_hosts_and_ports_of_a_name() -> None:
    async with name_server() as server:
        targets = ["0 0 50051 a.x.", "9 9 50052 b.x.", "0 0 1 ."]
        server.records = {("_grpc._tcp.x", "SRV"): targets}
        async with following(f"dns+srv://{server.address}/_grpc._tcp.x") as found:
            await found.finds("a.x:50051", "b.x:50052")


async def test_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "list of schedulers"
    async with following(f"file://{tmp_path}/list%20of%20schedulers") as found:
        await found.troubled("No such file")
        path.write_text("# ours\n\nb:2  # the second\ngrpc://a:1\nb:2\nunix:/x\n")
        await found.finds("a:1", "b:2", "unix:/x")
        for line in ("a:0", "a:65536", "a b:1", "http://a:1", "\x00a:1", "a"):
            path.write_text(f"c:3\n{line}\n")
            await found.troubled(f"line 2 has no address: {line!r}")
        path.write_bytes(b"a:1\n" * (1 << 19))
        await found.troubled("more than 1048576 bytes")
        other = tmp_path / "other"
        other.write_text("d:4\n")
        other.rename(path)
        await found.finds("d:4")
        path.write_text("")
        await found.finds()
        path.unlink()
        await found.troubled("No such file")
        os.mkfifo(path)
        await found.troubled("it is no file")
        path.unlink()
        path.write_text("".join(f"10.0.{n // 100}.{n % 100}:50051\n" for n in range(10_000)))
        await found.until(lambda: len(found.lists[-1]) == 256)
        assert "more than 256" in found.discovery.trouble
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) < 20, told
    assert all(one != other for one, other in itertools.pairwise(told)), "a trouble is told once"


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    """An API server that this process takes for that of its cluster."""
    server = KubernetesApi(tmp_path)
    monkeypatch.setattr(endpoint_slices, "ACCOUNT", tmp_path)
    async with server.running() as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        yield server


async def test_a_service_of_kubernetes(api: KubernetesApi, tmp_path: Path) -> None:
    api.slices = [endpoint_slice("one", "10.0.0.1", "10.0.0.2"), endpoint_slice("two", "10.0.0.3")]
    async with following("k8s://space/service") as found:
        await found.finds("10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051")
        watcher = await api.watchers.get()
        await api.send(watcher, "MODIFIED", endpoint_slice("one", "10.0.0.1", ends="10.0.0.1"))
        await found.finds("10.0.0.3:50051")
        await api.send(watcher, "ADDED", endpoint_slice("three", "10.0.0.4"))
        await found.finds("10.0.0.3:50051", "10.0.0.4:50051")
        await api.send(watcher, "DELETED", endpoint_slice("two", "10.0.0.3"))
        await found.finds("10.0.0.4:50051")
        await api.send(watcher, "BOOKMARK", {"metadata": {"resourceVersion": "99"}})
        (tmp_path / "token").write_text("second")
        await api.end(watcher)
        watcher = await api.watchers.get()
        assert not found.discovery.trouble, "a watch that ends after its time is no trouble"
        assert api.asked[-1]["resourceVersion"] == ["99"]
        assert api.asked[-1]["labelSelector"] == ["kubernetes.io/service-name=service"]
        assert (api.tokens[0], api.tokens[-1]) == ("first", "second")
        api.slices = [endpoint_slice("four", "fd00::1", family="IPv6")]
        await api.send(watcher, "ERROR", {"code": 410, "message": "too old resource version"})
        await found.finds("[fd00::1]:50051")
        watcher = await api.watchers.get()
        (tmp_path / "token").unlink()
        watcher.transport.abort()
        await found.troubled("cannot read")
        (tmp_path / "token").write_bytes(b"\xff")
        await found.troubled("is no text")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"status": 403}, "may not list and watch endpointslices of discovery.k8s.io in space"),
        ({"status": 401}, "the Kubernetes API says 401"),
        ({"slow": True}, "the Kubernetes API does not answer"),
        ({"slices": [{"nonsense": 1}]}, "says what no EndpointSlice is"),
        (
            {"slices": [endpoint_slice("one", "10.0.0.9", ports=("a", "b"))]},
            "2 ports of the Service",
        ),
        ({"slices": [endpoint_slice("one", "10.0.0.9", ports=())]}, "0 ports of the Service"),
        (
            {"slices": [endpoint_slice("one", "x y")]},
            "an EndpointSlice has no address: 'x y:50051'",
        ),
    ],
)
@pytest.mark.parametrize("known", [False, True])
async def test_troubles_with_kubernetes(
    api: KubernetesApi,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    text: str,
    known: bool,
) -> None:
    """At the start, and when schedulers are known, which stay so."""
    well = {"status": 200, "slow": False, "slices": [endpoint_slice("one", "10.0.0.1")]}

    def turn(changes: dict[str, object]) -> None:
        for name, value in changes.items():
            setattr(api, name, value)
        monkeypatch.setattr(endpoint_slices, "ANSWER_S", 0.3 if api.slow else PATIENCE_S)

    turn(well if known else change)
    async with following("k8s://space/service") as found:
        if known:
            await found.finds("10.0.0.1:50051")
            watcher = await api.watchers.get()
            turn(change)
            watcher.transport.abort()
        await found.troubled(text)
        turn(well)
        await found.finds("10.0.0.1:50051")
        await api.watchers.get()  # not in the midst of a handshake


async def test_a_version_that_is_too_old_again_and_again(api: KubernetesApi) -> None:
    api.status = 410
    async with following("k8s://space/service:grpc") as found:
        await found.until(lambda: len(api.asked) >= 3)
        assert not found.discovery.trouble
        api.slices = [endpoint_slice("one", "10.0.0.1", ports=("other", "grpc"))]
        api.status = 200
        await found.finds("10.0.0.1:50052")
        await api.watchers.get()
