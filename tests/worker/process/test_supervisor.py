"""The supervisor with real child processes and real signals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.fakes.rank import MEMO, NOTHING, SLEEP, SLEEP_IN_NATIVE_CODE
from support.processes.supervisor import (
    IDLE_S,
    STAND_IN,
    TIMEOUT_S,
    Supervised,
    supervising,
    template_of,
)
from surestep_common.process import STOPPED, state_of
from surestep_proto import supervisor_pb2 as pb
from surestep_worker.host.oom import OomKills
from surestep_worker.process import rank_process

pytestmark = pytest.mark.rotates(3)

LEAST_PRIORITY = 19  # of Linux


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    """Where the rank dumps its stacks."""
    return tmp_path / "stacks"


@pytest.fixture
def command(stacks: Path) -> list[str]:
    return [sys.executable, STAND_IN, str(stacks)]


@pytest.fixture
async def lone(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> AsyncIterator[Supervised]:
    """Without a standby."""
    async with supervising(monkeypatch, command) as running:
        yield running


@pytest.fixture
async def paired(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> AsyncIterator[Supervised]:
    """With a standby, once it is there."""
    async with supervising(monkeypatch, command, standby=True) as running:
        yield running


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def importers(stacks: Path) -> set[int]:
    """The processes that were not copied."""
    return {int(each.suffix[1:]) for each in stacks.parent.glob("stacks.nice.*")}


async def test_a_killed_rank_is_replaced(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    os.kill(first.rank_pid, signal.SIGKILL)
    second = await lone.ready(restarts=1)
    assert second.rank_pid != first.rank_pid
    assert second.address == "127.0.0.1:7"
    assert second.last_exit == f"pid {first.rank_pid}: signal SIGKILL"
    (end,) = second.exits
    assert (end.pid, end.cause, end.reason) == (first.rank_pid, pb.KILLED, "signal SIGKILL")
    assert end.outside
    assert end.last.phase == pb.IDLE
    assert 0 < end.replaced_s < 30


@pytest.mark.parametrize(
    ("kills", "number", "cause", "outside"),
    [
        (4, signal.SIGKILL, pb.OUT_OF_MEMORY, False),
        (3, signal.SIGKILL, pb.KILLED, True),
        (4, signal.SIGUSR1, pb.KILLED, True),  # that is not how the kernel does it
        (4, signal.SIGSEGV, pb.KILLED, False),
    ],
)
async def test_a_rank_that_the_kernel_killed_for_memory(
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    tmp_path: Path,
    kills: int,
    number: signal.Signals,
    cause: pb.ExitCause,
    outside: bool,
) -> None:
    """The counter was 3 before this death, and is `kills` behind it."""
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 3\n")
    async with supervising(monkeypatch, command, oom=OomKills([counter])) as running:
        first = await running.ready(restarts=0)
        counter.write_text(f"oom 1\noom_kill {kills}\n")
        os.kill(first.rank_pid, number)
        second = await running.ready(restarts=1)
        os.kill(second.rank_pid, signal.SIGKILL)
        next_end, end = (await running.ready(restarts=2)).exits
    assert (end.cause, end.signal, end.outside) == (cause, number, outside)
    assert ("out of memory" in end.reason) == (cause == pb.OUT_OF_MEMORY)
    if cause == pb.OUT_OF_MEMORY:  # one kill by the kernel does not explain two deaths
        assert (next_end.cause, next_end.outside) == (pb.KILLED, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_rank_that_somebody_asks_to_leave(lone: Supervised, number: signal.Signals) -> None:
    """Whatever is seen of it first: that its stream broke, that it ended, or that it is quiet."""
    first = await lone.ready(restarts=0)
    await lone.step(NOTHING, budget_ms=500)
    os.kill(first.rank_pid, number)
    assert await lone.call.code() != grpc.StatusCode.OK
    await lone.restart(first.rank_pid)
    (end,) = (await lone.ready(restarts=1)).exits
    assert end.outside, end


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may take longer to dump its stacks than the tests wait for anything."""
    monkeypatch.setattr(rank_process, "_STACK_DUMP_S", 2 * TIMEOUT_S)


@pytest.mark.usefixtures("patient")
async def test_restart_kills_a_stopped_rank_without_waiting_for_its_stacks(
    lone: Supervised,
) -> None:
    first = await lone.ready(restarts=0)
    os.kill(first.rank_pid, signal.SIGSTOP)
    async with asyncio.timeout(TIMEOUT_S):
        while state_of(first.rank_pid) != STOPPED:
            await asyncio.sleep(0.001)
    assert await lone.restart(first.rank_pid)
    second = await lone.ready(restarts=1)
    assert second.rank_pid != first.rank_pid
    assert not alive(first.rank_pid)
    assert second.exits[0].cause == pb.REQUESTED
    assert second.exits[0].reason == "restart: test"


@pytest.mark.usefixtures("patient")
async def test_restart_dumps_the_stacks_of_the_rank(lone: Supervised, stacks: Path) -> None:
    """And goes on when it has: the end of the dump is noticed."""
    await lone.ready(restarts=0)
    await lone.restart()
    assert "most recent call first" in stacks.read_text()


async def test_restart_of_another_process_does_nothing(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    assert not await lone.restart(first.rank_pid + 1)
    assert (await lone.status()).rank_pid == first.rank_pid


def found_late(end: pb.RankExit) -> tuple[str, float]:
    """Return the phase that a rank hung in and its limit, right behind which it was found.

    By the supervisor's own clock: in time in which it has no turn nobody is late for it.
    """
    said = re.fullmatch(r"hung: (.+) for (\d+\.\d) s \(limit (\d+\.\d) s\)", end.reason)
    assert said is not None, end.reason
    stood_s, limit_s = float(said[2]), float(said[3])
    assert limit_s - 0.1 < stood_s < limit_s + 0.4
    return said[1], limit_s


@pytest.mark.parametrize("how", [SLEEP, SLEEP_IN_NATIVE_CODE])
async def test_a_step_that_hangs_ends_the_rank(lone: Supervised, stacks: Path, how: int) -> None:
    await lone.ready(restarts=0)
    await lone.step(how, budget_ms=1000)
    after = await lone.until(lambda now: now.restarts == 1)
    (end,) = after.exits
    assert end.cause == pb.HUNG
    phase, limit_s = found_late(end)
    assert phase == "FORWARD of step 1 in epoch 1"
    assert abs(limit_s - 1.45) < 0.06
    assert (end.last.phase, end.last.epoch, end.last.step) == (pb.FORWARD, 1, 1)
    assert "in launch" in stacks.read_text()
    await lone.ready(restarts=1)


async def test_a_stopped_rank_is_found_although_it_is_idle(lone: Supervised) -> None:
    first = await lone.ready(restarts=0)
    began = time.monotonic()
    os.kill(first.rank_pid, signal.SIGSTOP)
    after = await lone.until(lambda now: now.restarts == 1)
    assert time.monotonic() - began > IDLE_S / 2
    assert after.exits[0].cause == pb.HUNG
    assert found_late(after.exits[0]) == ("IDLE", IDLE_S)
    assert after.exits[0].outside


async def test_a_quiet_rank_is_left_alone(lone: Supervised) -> None:
    await lone.ready(restarts=0)
    began = time.monotonic()
    await lone.step(NOTHING, budget_ms=500)
    now = await lone.until(
        lambda now: time.monotonic() - began > 2 * IDLE_S and now.heartbeat.age_s < IDLE_S
    )
    assert (now.restarts, now.heartbeat.phase, now.heartbeat.epoch) == (0, pb.IDLE, 1)


async def test_a_rank_whose_loop_is_blocked_is_found(lone: Supervised, stacks: Path) -> None:
    first = await lone.ready(restarts=0)
    os.kill(first.rank_pid, signal.SIGUSR2)
    after = await lone.until(lambda now: now.restarts == 1)
    assert after.exits[0].cause == pb.HUNG


async def test_the_next_rank_gets_memo_and_weights(lone: Supervised) -> None:
    await lone.ready(restarts=0)
    assert (await lone.info()).model_path == ""
    assert (await lone.status()).held_weight_bytes == len(b"weights")
    await lone.restart()
    await lone.ready(restarts=1)
    assert (await lone.info()).model_path == MEMO.decode()
    assert (await lone.status()).held_weight_bytes == len(b"weights")


async def test_a_standby_takes_over(paired: Supervised) -> None:
    first = await paired.until(lambda now: now.standby_pid)
    os.kill(first.rank_pid, signal.SIGKILL)
    second = await paired.ready(restarts=1)
    assert second.rank_pid == first.standby_pid
    third = await paired.until(lambda now: now.standby_pid)
    assert third.standby_pid != second.rank_pid


async def test_one_standby_follows_another_at_once(paired: Supervised, stacks: Path) -> None:
    """Nothing is imported for it: the template is copied."""
    now = await paired.until(lambda now: now.standby_pid)
    for restarts in range(1, 6):
        os.kill(now.rank_pid, signal.SIGKILL)
        now, before = await paired.ready(restarts=restarts), now
        assert now.rank_pid == before.standby_pid
        now = await paired.until(lambda now: now.standby_pid)
    assert len(importers(stacks)) == 1, "the first rank"


async def test_without_its_standby_the_template_takes_over(
    paired: Supervised, stacks: Path
) -> None:
    now = await paired.until(lambda now: now.standby_pid)
    known = now.rank_pid, now.standby_pid, template_of(now)
    for pid in known[:2]:
        os.kill(pid, signal.SIGKILL)
    assert (await paired.ready(restarts=1)).rank_pid == known[2]
    again = await paired.until(lambda now: now.standby_pid)
    assert again.standby_pid not in known
    assert len(importers(stacks)) == 1


async def test_a_standby_without_its_template_becomes_one(paired: Supervised, stacks: Path) -> None:
    now = await paired.until(lambda now: now.standby_pid)
    os.kill(template_of(now), signal.SIGKILL)
    gone = now.standby_pid
    again = await paired.until(lambda now: now.standby_pid not in (0, gone))
    os.kill(again.rank_pid, signal.SIGKILL)
    assert (await paired.ready(restarts=1)).rank_pid == again.standby_pid
    assert len(importers(stacks)) == 1


async def test_a_first_rank_that_never_gets_ready_has_left_a_template(
    monkeypatch: pytest.MonkeyPatch, command: list[str], stacks: Path
) -> None:
    """Which the next attempts are copies of: they import nothing."""
    async with supervising(monkeypatch, [*command, "crashes"], standby=True) as running:
        after = await running.until(lambda now: now.restarts == 3)
        assert len({end.pid for end in after.exits}) == 3
        assert len(importers(stacks)) == 1


async def test_a_first_rank_that_is_killed_while_it_imports_leaves_none(
    monkeypatch: pytest.MonkeyPatch, command: list[str], stacks: Path
) -> None:
    async with supervising(monkeypatch, command, standby=True) as running:
        first = await running.until(lambda now: now.rank_pid)
        os.kill(first.rank_pid, signal.SIGKILL)  # it has hardly begun
        now = await running.until(lambda now: now.standby_pid)
        assert now.restarts == 1
        assert importers(stacks) == {now.rank_pid}


@pytest.mark.parametrize("what", ["has threads", "holds a GPU"])
async def test_what_a_fork_would_not_have_keeps_it_from_being_copied(
    monkeypatch: pytest.MonkeyPatch, command: list[str], stacks: Path, what: str
) -> None:
    async with supervising(monkeypatch, [*command, what], standby=True) as running:
        now = await running.until(lambda now: now.standby_pid)
        assert importers(stacks) == {now.rank_pid, now.standby_pid}
        os.kill(now.rank_pid, signal.SIGKILL)
        assert (await running.ready(restarts=1)).rank_pid == now.standby_pid
        again = await running.until(lambda now: now.standby_pid)
        assert again.standby_pid in importers(stacks)


async def test_a_standby_prepares_with_low_priority_and_serves_with_none(
    paired: Supervised, stacks: Path
) -> None:
    first = await paired.until(lambda now: now.standby_pid)
    gone = first.standby_pid
    for pid in (gone, template_of(first)):
        os.kill(pid, signal.SIGKILL)
    first = await paired.until(lambda now: now.standby_pid not in (0, gone))
    (started,) = importers(stacks) - {first.rank_pid}
    numbers = first.rank_pid, started
    prepared = [int(stacks.with_name(f"stacks.nice.{pid}").read_text()) for pid in numbers]
    own = os.nice(0)
    assert prepared == [own, min(own + 10, LEAST_PRIORITY)]
    for pid in (first.rank_pid, first.standby_pid):
        os.kill(pid, signal.SIGKILL)
    second = await paired.ready(restarts=1)
    assert second.rank_pid == started
    threads = Path(f"/proc/{second.rank_pid}/task").iterdir()
    assert {os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in threads} == {own}


async def test_a_standby_that_dies_is_replaced(paired: Supervised) -> None:
    first = await paired.until(lambda now: now.standby_pid)
    os.kill(first.standby_pid, signal.SIGKILL)
    gone = first.standby_pid
    second = await paired.until(lambda now: now.standby_pid not in (0, gone))
    assert (second.rank_pid, second.restarts) == (first.rank_pid, 0)


async def test_a_stopped_standby_is_not_waited_for_long(paired: Supervised) -> None:
    first = await paired.until(lambda now: now.standby_pid)
    os.kill(first.standby_pid, signal.SIGSTOP)
    os.kill(first.rank_pid, signal.SIGKILL)
    second = await paired.ready(restarts=2)
    hung, killed = second.exits
    assert (hung.pid, hung.cause) == (first.standby_pid, pb.HUNG)
    assert (killed.pid, killed.cause) == (first.rank_pid, pb.KILLED)
    assert killed.replaced_s > hung.replaced_s > 0


async def test_ranks_that_never_get_ready_are_started_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    async with supervising(monkeypatch, [*command, "crashes"]) as running:
        began = time.monotonic()
        third = await running.until(lambda now: now.restarts == 3)
        assert time.monotonic() - began > 0.5 + 1.0
        assert third.held_weight_bytes == 0, "weights without a seal were kept"
        assert [end.reason for end in third.exits] == ["RuntimeError: crashes while loading"] * 3
        assert third.failure == "RuntimeError: crashes while loading"
        assert not third.failure_is_permanent
        assert {end.cause for end in third.exits} == {pb.EXITED}
        assert third.exits[0].last.phase == pb.LOADING
        assert {end.replaced_s for end in third.exits} == {0.0}


async def test_loading_that_makes_no_progress_ends(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    async with supervising(monkeypatch, [*command, "dozes"], load_s=1.0) as running:
        after = await running.until(lambda now: now.restarts == 1)
        assert after.exits[0].cause == pb.HUNG
        assert after.exits[0].reason.startswith("hung: ")


async def test_nothing_outlives_the_supervisor(paired: Supervised) -> None:
    now = await paired.until(lambda now: now.standby_pid)
    await paired.stop()
    assert not any(map(alive, (now.rank_pid, now.standby_pid)))
