"""Two real ranks under their supervisors: whichever dies, the group is back, from standbys."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_address
from surestep_common import rpc
from surestep_common.tasks import end
from surestep_proto import sampling_pb2, worker_pb2
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2_grpc as pb_grpc
from surestep_worker.config import WorkerSettings
from surestep_worker.process.child import rank_command
from surestep_worker.process.supervisor import Supervisor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.rotates(3)]
TIMEOUT_S = 120
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


class Group:
    """Supervisors and ranks of a group, as a scheduler uses them."""

    def __init__(self, supervisors: list[Supervisor], settings: list[WorkerSettings]) -> None:
        self.supervisors = supervisors
        self._settings = settings
        self._epoch = 0

    async def statuses(self) -> list[pb.SupervisorStatus]:
        request = pb.SupervisorStatusRequest()
        return [await each.Status(request, None) for each in self.supervisors]  # type: ignore[arg-type]

    async def until(
        self, wanted: Callable[[pb.SupervisorStatus], object]
    ) -> list[pb.SupervisorStatus]:
        """Poll until every status is as wanted."""
        async with asyncio.timeout(TIMEOUT_S):
            while not all(map(wanted, now := await self.statuses())):
                await asyncio.sleep(0.02)
        return now

    async def deaths(self, before: list[pb.SupervisorStatus], victims: Sequence[int]) -> None:
        """Wait until the supervisors of these ranks have seen them die, and replace them."""
        counts = {rank: before[rank].restarts for rank in range(2)}
        await self.until(lambda now: now.rank not in victims or now.restarts > counts[now.rank])

    async def restart(self, pids: Sequence[int]) -> None:
        """The epoch is lost: every rank that is still of it has to go."""
        requests = [pb.RestartRequest(reason="group", expected_pid=pid) for pid in pids]
        pairs = zip(self.supervisors, requests, strict=True)
        await asyncio.gather(*(each.Restart(request, None) for each, request in pairs))  # type: ignore[arg-type]

    async def step(self) -> list[int]:
        """Run a forward pass with its collectives on both ranks. Returns the digests."""
        self._epoch += 1
        plan = worker_pb2.StepPlan(
            epoch=self._epoch,
            step=1,
            budget_ms=20_000,
            admissions=[
                worker_pb2.Admission(
                    slot=0,
                    slot_epoch=1,
                    token_ids=[5, 6, 7],
                    prompt_len=3,
                    max_len=64,
                    sampling=sampling_pb2.SamplingParams(top_p=1, repetition_penalty=1),
                )
            ],
            extend_slots=[0],
            extend_counts=[1],
            block_ids=[1],
            slot=[0],
            slot_epoch=[1],
            mode=[worker_pb2.PREFILL_LAST],
            num_tokens=[3],
            len_lo=[0],
            len_hi=[0],
            max_drafts=[0],
            max_proposed=[0],
            max_looked_up=[0],
            accepted_step=[0],
            accepted=[0],
            depends_on_step=[0],
            catch_up=[0],
        )
        return list(await asyncio.gather(*(self._digest(s, plan) for s in self._settings)))

    async def _digest(self, settings: WorkerSettings, plan: worker_pb2.StepPlan) -> int:
        async with rpc.connect(settings.rank_address) as channel:
            call = pb_grpc.WorkerStub(channel).Run(timeout=TIMEOUT_S, wait_for_ready=True)
            await call.write(plan)
            result = await call.read()
            await call.done_writing()
        assert isinstance(result, worker_pb2.StepResult)
        return int(result.digest)


@pytest.fixture
async def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    model, meeting = make_tiny_checkpoint(tmp_path / "model"), free_address()
    listen = [free_address() for _ in range(2)]
    settings = [
        WorkerSettings(
            model=model,
            rank=rank,
            tensor_parallel_size=2,
            tp_master=meeting,
            worker_listen=_less(listen[rank], rank),
            speculative_config=NGRAM,
            max_num_seqs=4,
            kv_cache_memory=0.01,
            heartbeat_timeout_s=20,
        )
        for rank in range(2)
    ]
    supervisors = [Supervisor(rank_command(), each) for each in settings]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run()) for each in supervisors]
        try:
            yield Group(supervisors, settings)
        finally:
            await asyncio.gather(*map(end, running))
            await asyncio.gather(*(each.close() for each in supervisors))


def _less(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - rank}"


def is_ready(now: pb.SupervisorStatus) -> bool:
    return bool(now.rank_state == pb.READY)


async def test_a_group_comes_back_from_its_standbys(group: Group) -> None:
    await group.until(is_ready)
    (expected, same) = await group.step()
    assert expected == same
    for victims in ([1], [0], [0, 1]):
        before = await group.until(lambda now: is_ready(now) and now.standby_pid)
        for rank in victims:
            os.kill(before[rank].rank_pid, signal.SIGKILL)
        began = time.monotonic()
        await group.deaths(before, victims)
        await group.restart([status.rank_pid for status in before])
        after = await group.until(is_ready)
        assert time.monotonic() - began < 20, "a rank waited for its peer until a timeout"
        assert [now.rank_pid for now in after] == [now.standby_pid for now in before]
        assert await group.step() == [expected, expected]


async def test_ranks_rehearse_together_or_not_at_all(group: Group) -> None:
    before = await group.until(lambda now: is_ready(now) and now.standby_pid)
    group.supervisors[1]._profile_result = b""
    await group.restart([status.rank_pid for status in before])
    await group.until(is_ready)
    (one, other) = await group.step()
    assert one == other


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_group_mends_itself_while_there_is_no_scheduler(group: Group, victim: int) -> None:
    before = await group.until(lambda now: is_ready(now) and now.standby_pid)
    os.kill(before[victim].rank_pid, signal.SIGKILL)
    began = time.monotonic()
    after = await group.until(lambda now: is_ready(now) and now.restarts == 1)
    assert time.monotonic() - began < 20, "a rank waited for its peer until a timeout"
    assert after[1 - victim].exits[0].reason == f"rank {victim} has left the group"
    (one, other) = await group.step()
    assert one == other
