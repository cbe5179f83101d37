"""Children that give no sign of life any more, with real processes; and when what is done."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import hanging_service
from support.processes.ports import free_address
from surestep_cli.serve.child import Child, Command
from surestep_cli.serve.liveness import LivenessCheck, watch
from surestep_common.config import NOTIFY_SOCKET
from surestep_common.notify import ALIVE, Listener, Notifier

LOOK_S = 0.3


@asynccontextmanager
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Child]:
    monkeypatch.setattr("surestep_cli.serve.liveness._LOOK_S", LOOK_S)
    monkeypatch.setattr("surestep_cli.serve.liveness._END", 8)
    signs, port = Listener(), free_address().rpartition(":")[2]
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), NOTIFY_SOCKET: signs.address}
    argv = (sys.executable, hanging_service.__file__, port)
    child = Child(Command(name="it", argv=argv, environ=environ, log_path=tmp_path / "it.log"))
    child.proven = True
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        await until(signs.heard)
        watching = tasks.create_task(watch(child, signs))
        await asyncio.sleep(2 * LOOK_S)  # it is known to live
        yield child
        watching.cancel()
        await child.stop(5)
    signs.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_stopped_child_is_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path, monkeypatch) as child:
        process = psutil.Process(child.pid)
        process.suspend()
        await until(lambda: caplog.messages)
        assert caplog.messages == ["it gives no sign of life for 1 s: resuming it"]
        await until(lambda: process.status() != psutil.STATUS_STOPPED)
        assert child.pid == process.pid


async def test_a_child_that_hangs_shows_its_stacks_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path, monkeypatch) as child:
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGUSR2)  # blocks its loop
        await until(lambda: child.pid not in (None, first))
        assert "in block_here" in child.command.log_path.read_text()
        assert [message.partition(":")[2] for message in caplog.messages[:2]] == [
            *(" resuming it", " killed")
        ]


def test_signs_are_heard_while_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    signs = Listener()
    monkeypatch.setenv(NOTIFY_SOCKET, signs.address)
    notifier = Notifier()
    assert not signs.heard()
    for _ in range(100):  # more than its queue holds: nobody is held up
        notifier.tell(ALIVE)
    assert signs.heard()
    assert not signs.heard()
    signs.close()
    notifier.tell(ALIVE)  # nobody listens: no matter


class Recorded(Child):
    """Does nothing, and says what it would have done."""

    def __init__(self) -> None:
        super().__init__(Command(name="it", argv=(), environ={}, log_path=Path()))
        self.process: int | None = 1
        self.done: list[str] = []

    @property
    def pid(self) -> int | None:
        return self.process

    def _signal_all(self, number: int) -> None:
        """Signal no one: the process is made up."""

    def resume(self) -> None:
        self.done.append("resumed")

    async def end(self) -> None:
        self.done.append("ended")


looks = st.sampled_from(["sign", "none", "none", "none", "another process", "no process"])


@given(st.lists(looks, max_size=80))
async def test_only_silence_in_a_row_counts_and_only_of_one_process(history: list[str]) -> None:
    child = Recorded()
    vigil = LivenessCheck(child)
    silent, known = 0, False
    for number, look in enumerate(history):
        if look == "another process":
            child.process, silent, known = number + 2, 0, False
        elif look == "no process":
            child.process, silent, known = None, 0, False
        child.done.clear()
        await vigil.looked(alive=look == "sign")
        if child.process is None:
            assert child.done == []
            continue
        known = known or look == "sign"
        silent = 0 if look == "sign" else silent + 1
        if known and silent >= 12:
            assert child.done == ["ended"]
        else:
            assert child.done == (["resumed"] if known and silent == 4 else [])


async def test_a_child_that_never_starts_to_live_is_ended_at_last() -> None:
    child = Recorded()
    vigil = LivenessCheck(child)
    for _ in range(119):
        await vigil.looked(alive=False)
    assert child.done == []
    await vigil.looked(alive=False)
    assert child.done == ["ended"]


async def test_a_child_that_is_told_to_stop_may_be_silent() -> None:
    child = Recorded()
    vigil = LivenessCheck(child)
    await vigil.looked(alive=True)
    child.kill()
    for _ in range(200):
        await vigil.looked(alive=False)
    assert child.done == []
