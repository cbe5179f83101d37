"""Ranks that cannot start: the supervisor knows why, and keeps what may still be of use."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.supervisor import STAND_IN, Supervised, supervising, template_of
from surestep_proto import supervisor_pb2 as pb

pytestmark = pytest.mark.rotates(3)


class Setbacks:
    """A supervised stand-in, and what makes it fail."""

    def __init__(self, running: Supervised, orders: Path, model: Path) -> None:
        self.running = running
        self._orders = orders
        self.model = model

    def refuse(self, error: str, reason: str) -> None:
        """From now on ranks fail when they load."""
        scratch = self._orders.with_suffix(".new")
        scratch.write_text(f"{error} {reason}")
        scratch.rename(self._orders)

    def allow(self) -> None:
        self._orders.unlink()

    async def lose(self) -> pb.SupervisorStatus:
        """The rank is killed; returns what was then."""
        now = await self.running.status()
        os.kill(now.rank_pid, signal.SIGKILL)
        return now

    async def failed(self, count: int) -> pb.SupervisorStatus:
        """So many ranks in all have ended, and the newest says why."""
        return await self.running.until(lambda now: now.restarts >= count and now.failure)

    async def again(self) -> pb.SupervisorStatus:
        """A rank is ready."""
        return await self.running.until(lambda now: now.rank_state == pb.READY)


@pytest.fixture
async def setbacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Setbacks]:
    """With a real checkpoint in the model folder, and little patience."""
    monkeypatch.setattr("surestep_worker.process.standbys.BACKOFF_S", (0.0, 0.05))
    monkeypatch.setattr("surestep_worker.process.supervisor._PERMANENT_RETRY_S", 0.5)
    model = make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=1)
    stacks = tmp_path / "stacks"
    command = [sys.executable, STAND_IN, str(stacks)]
    async with supervising(monkeypatch, command, model=model) as running:
        await running.ready(restarts=0)
        yield Setbacks(running, tmp_path / "stacks.refuse", model)


async def test_weights_are_kept_while_there_are_no_others(setbacks: Setbacks) -> None:
    setbacks.model.rename(setbacks.model.with_name("gone"))
    setbacks.refuse("RuntimeError", "no luck")
    await setbacks.lose()
    now = await setbacks.failed(6)
    assert now.failure == "RuntimeError: no luck"
    assert not now.failure_is_permanent
    assert now.held_weight_bytes > 0
    setbacks.allow()
    now = await setbacks.again()
    assert (now.failure, now.held_weight_bytes > 0) == ("", True)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), PermissionError(13, "no"), MemoryError()]
)
async def test_weights_are_kept_when_nobody_can_look_for_others(
    setbacks: Setbacks, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Such a supervisor goes on: with it the weights would be gone."""

    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr("surestep_worker.checkpoint.weight_update.fingerprint", fails)
    setbacks.refuse("RuntimeError", "no luck")
    await setbacks.lose()
    assert (await setbacks.failed(6)).held_weight_bytes > 0
    setbacks.allow()
    assert (await setbacks.again()).held_weight_bytes > 0


async def test_weights_are_kept_when_the_folder_holds_another_model(setbacks: Setbacks) -> None:
    make_tiny_checkpoint(setbacks.model, hidden=32, layers=1, seed=1)
    setbacks.refuse("RuntimeError", "no luck")
    await setbacks.lose()
    assert (await setbacks.failed(6)).held_weight_bytes > 0


async def test_weights_are_loaded_afresh_when_ranks_fail_and_they_can_be(
    setbacks: Setbacks,
) -> None:
    setbacks.refuse("RuntimeError", "no luck")
    await setbacks.lose()
    assert (await setbacks.failed(2)).held_weight_bytes > 0
    assert (await setbacks.failed(5)).held_weight_bytes == 0
    setbacks.allow()
    assert (await setbacks.again()).held_weight_bytes > 0


async def test_weights_that_a_rank_cannot_use_are_given_up_at_once(setbacks: Setbacks) -> None:
    setbacks.refuse("StaleWeights", "for another machine")
    await setbacks.lose()
    now = await setbacks.failed(2)
    assert now.failure == "for another machine"
    assert now.held_weight_bytes == 0
    assert not now.failure_is_permanent


async def test_a_lasting_failure_is_tried_again_rarely_and_passes_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("surestep_worker.process.supervisor._PERMANENT_RETRY_S", 1.0)
    orders = tmp_path / "stacks.refuse"
    orders.write_text("InvalidRequest config.json: hidden_size is -1")
    command = [sys.executable, STAND_IN, str(tmp_path / "stacks")]
    async with supervising(monkeypatch, command) as running:
        now = await running.until(lambda now: now.restarts == 2)
        assert now.failure == "config.json: hidden_size is -1"
        assert now.failure_is_permanent
        newest, first = now.exits
        assert first.age_s - newest.age_s > 1.0
        assert {end.reason for end in now.exits} == {"config.json: hidden_size is -1"}
        assert "rank 0: next attempt in 1 s" in caplog.messages
        orders.unlink()
        now = await running.until(lambda now: now.rank_state == pb.READY)
        assert (now.failure, now.failure_is_permanent) == ("", False)


async def test_a_lasting_failure_is_no_reason_to_wait_once_weights_are_there(
    monkeypatch: pytest.MonkeyPatch, setbacks: Setbacks
) -> None:
    monkeypatch.setattr("surestep_worker.process.supervisor._PERMANENT_RETRY_S", 60.0)
    setbacks.refuse("InvalidRequest", "out of memory")
    await setbacks.lose()
    now = await setbacks.failed(3)
    assert now.failure_is_permanent


async def test_what_ended_a_rank_without_a_word_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [sys.executable, STAND_IN, str(tmp_path / "stacks"), "dozes"]
    async with supervising(monkeypatch, command) as running:
        now = await running.until(lambda now: now.heartbeat.phase == pb.LOADING)
        os.kill(now.rank_pid, signal.SIGKILL)
        assert (await running.until(lambda now: now.failure)).failure == "signal SIGKILL"


async def test_processes_that_cannot_be_started_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("surestep_worker.process.standbys.BACKOFF_S", (0.0, 0.2))
    program = tmp_path / "program"  # not there yet
    async with supervising(monkeypatch, [str(program), str(tmp_path / "stacks")]) as running:
        now = await running.until(lambda now: now.failure)
        assert now.failure.startswith("no process can be started: [Errno 2]")
        program.write_text(f"#!/bin/sh\nexec {sys.executable} {STAND_IN} $*\n")
        program.chmod(0o755)
        now = await running.until(lambda now: now.rank_state == pb.READY)
        assert (now.failure, now.restarts) == ("", 0)


async def test_a_rank_lives_without_a_standby_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("surestep_worker.process.standbys.BACKOFF_S", (0.0, 0.2))
    program = tmp_path / "program"
    text = f"#!/bin/sh\nexec {sys.executable} {STAND_IN} $*\n"
    program.write_text(text)
    program.chmod(0o755)
    command = [str(program), str(tmp_path / "stacks")]
    async with supervising(monkeypatch, command, standby=True) as running:
        now = await running.until(lambda now: now.standby_pid)
        program.chmod(0o644)
        for pid in (gone := now.standby_pid), template_of(now):
            os.kill(pid, signal.SIGKILL)
        await running.until(lambda _: "rank 0 has no standby" in caplog.text)
        assert (await running.status()).rank_pid == now.rank_pid
        program.chmod(0o755)
        again = await running.until(lambda now: now.standby_pid not in (0, gone))
        assert again.restarts == 0
