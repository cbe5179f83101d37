"""Tiers that fail: they rest, and whoever asks goes on without them."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from support.processes.redis_server import redis_server
from surestep_common.errors import InvalidRequest
from surestep_worker.tiers import stack as stack_module
from surestep_worker.tiers import tier as tiers
from surestep_worker.tiers.entry import Entry, EntryForm, Kind, Name
from surestep_worker.tiers.folder import FolderTier
from surestep_worker.tiers.host import HostTier
from surestep_worker.tiers.stack import Stack
from surestep_worker.tiers.store import StoreTier, client_of
from surestep_worker.tiers.tier import RestingTier

FORM = EntryForm.of("a model")
Opened = Callable[[str, int, EntryForm], StoreTier]
NAME = Name(Kind.BLOCK, b"k" * 16)
SIZE = 64
ENTRY = FORM.pack(NAME, torch.ones(SIZE, dtype=torch.uint8))


class Broken:
    """A tier whose calls fail, or do not return before they are let go."""

    label = "disk"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, 0
        self.go_on = threading.Event()

    def present(self, names: Sequence[Name]) -> list[bool]:
        self._fail()
        return [True] * len(names)

    def read(self, name: Name, nbytes: int) -> Entry | None:
        self._fail()
        return ENTRY

    def write(self, name: Name, entry: Entry) -> None:
        self._fail()

    def remove(self, names: Sequence[Name]) -> None:
        self._fail()

    def _fail(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        assert self.go_on.wait(30)


def test_a_full_disk_costs_one_call(caplog: pytest.LogCaptureFixture) -> None:
    full = Broken(OSError(28, "No space left on device"))
    near = HostTier(1 << 20)
    stack = Stack(FORM, near, [full])
    for _ in range(20):
        assert stack.write(NAME, ENTRY)
        assert stack.read(NAME, SIZE) is ENTRY or near.present([NAME]) == [True]
    stack.close(30)
    assert full.calls == 1
    assert stack.present([NAME]) == [True]  # near
    assert "the disk behind the KV cache rests: [Errno 28]" in caplog.text


def test_a_hanging_disk_keeps_one_thread_and_no_other() -> None:
    now, hanging = [100.0], Broken()
    resting = RestingTier(hanging, lambda: now[0])
    first = threading.Thread(target=resting.call, args=(None, hanging.read, NAME, SIZE))
    first.start()
    while not hanging.calls:
        pass
    now[0] += tiers._SLOW_S + 0.1
    assert not resting.works
    assert resting.call("nothing", hanging.read, NAME, SIZE) == "nothing"
    assert hanging.calls == 1
    hanging.go_on.set()
    first.join(30)
    now[0] += tiers._REST_S + 0.1
    assert resting.call(None, hanging.read, NAME, SIZE) is ENTRY


def test_a_slow_disk_holds_up_who_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much waits in memory, and no more; what is waited for in vain is not stored."""
    monkeypatch.setattr(stack_module, "_MOST_WAITING", 3 * ENTRY.nbytes)
    monkeypatch.setattr(stack_module, "_ROOM_S", 0.01)
    slow = Broken()
    stack = Stack(FORM, None, [slow])
    assert [stack.write(NAME, ENTRY) for _ in range(5)] == [True] * 3 + [False] * 2
    slow.go_on.set()
    monkeypatch.setattr(stack_module, "_ROOM_S", 30.0)
    assert all(stack.write(NAME, ENTRY) for _ in range(20))
    stack.close(30)
    assert slow.calls == 23


def test_a_folder_that_is_gone_comes_back(tmp_path: Path) -> None:
    folder = FolderTier(tmp_path / "a" / "b", 1 << 20, FORM)
    assert folder.present([NAME]) == [False]
    assert folder.read(NAME, SIZE) is None
    folder.write(NAME, ENTRY)
    assert folder.read(NAME, SIZE) is not None


def test_a_store_that_is_killed_rests_and_comes_back(tmp_path: Path, opened: Opened) -> None:
    now = [0.0]
    with redis_server(tmp_path) as (url, server):
        store = opened(url, 1 << 20, FORM)
        resting = RestingTier(store, lambda: now[0])
        resting.call(None, store.write, NAME, ENTRY)
        assert resting.call(None, store.read, NAME, SIZE) is not None
        server.kill()
        server.wait()
        assert resting.call(None, store.read, NAME, SIZE) is None
        assert not resting.works
    now[0] += tiers._REST_S + 0.1
    port = int(url.rsplit(":", 1)[1].split("/")[0])
    with redis_server(tmp_path, port=port):
        assert resting.call([True], store.present, [NAME]) == [False]
        assert resting.works


def test_a_store_wants_its_password(tmp_path: Path, opened: Opened) -> None:
    with redis_server(tmp_path) as (url, _):
        open_one = opened(url, 1 << 20, FORM)
        open_one._client.config_set("requirepass", "hunter2")
        refused = opened(url, 1 << 20, FORM)
        with pytest.raises(OSError, match=r"(?i)authentication required"):
            refused.present([NAME])
        admitted = opened(url.replace("//", "//:hunter2@"), 1 << 20, FORM)
        assert admitted.present([NAME]) == [False]


@pytest.mark.parametrize("url", ["redis://user:[hunter2@cache:6379/0", "http://cache"])
def test_what_is_no_store_is_said_without_the_password(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis://USER:PASSWORD@HOST") as caught:
        client_of(url)
    assert "hunter2" not in str(caught.value)


async def test_a_store_behind_tls(tmp_path: Path, opened: Opened) -> None:
    """Its certificate is checked, by an authority that the URL names."""
    authority, ca = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with redis_server(tmp_path) as (url, _):
        port = int(url.rsplit(":", 1)[1].split("/")[0])

        forwarding = list[asyncio.Task[Any]]()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()
            await sink.wait_closed()

        async def forward(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
            forwarding.append(asyncio.current_task())  # type: ignore[arg-type]
            server, ask = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(client, ask), pump(server, answer))

        async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as proxy:
            secured = f"rediss://localhost:{proxy.sockets[0].getsockname()[1]}/0"
            trusting = opened(f"{secured}?ssl_ca_certs={ca}", 1 << 20, FORM)
            await asyncio.to_thread(trusting.write, NAME, ENTRY)
            assert await asyncio.to_thread(trusting.read, NAME, SIZE) is not None
            with pytest.raises(OSError, match="certificate verify failed"):
                await asyncio.to_thread(opened(secured, 1, FORM).present, [NAME])
            trusting.close()
            async with asyncio.timeout(30):
                await asyncio.gather(*forwarding)
