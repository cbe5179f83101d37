"""GET /overview: what the status page shows, for many at the price of one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.apis.operators.overview_model import Overview
from surestep_proto import supervisor_pb2, worker_pb2
from surestep_proto.scheduler_pb2 import (
    RECOVERING,
    WAITING_FOR_WORKERS,
    AdapterLoad,
    DraftingValue,
    Incident,
    RecentSteps,
    SchedulerStats,
    SchedulerStatus,
    StepStats,
)


async def overview(stack: Stack) -> Overview:
    """Return an overview that is fresh enough."""
    reply = await stack.client.get("/overview")
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    return Overview.model_validate_json(reply.content)


async def until(stack: Stack, condition: Any) -> Overview:
    """Return the first that fits."""
    async with asyncio.timeout(15):
        while not condition(seen := await overview(stack)):
            await asyncio.sleep(0.05)
    return seen


def busy() -> SchedulerStatus:
    """Make a rank that works and one that is gone, a loss, and two steps."""
    heartbeat = supervisor_pb2.Heartbeat(phase=supervisor_pb2.FORWARD, age_s=0.25)
    exits = [
        supervisor_pb2.RankExit(pid=40 + i, cause=supervisor_pb2.KILLED, reason="x" * 9999, age_s=i)
        for i in range(20)
    ]
    return SchedulerStatus(
        supervisors=[
            supervisor_pb2.SupervisorStatus(
                rank=0,
                rank_state=supervisor_pb2.READY,
                rank_pid=50,
                restarts=2,
                heartbeat=heartbeat,
            ),
            supervisor_pb2.SupervisorStatus(rank=1, rank_state=supervisor_pb2.DEAD, exits=exits),
        ],
        ranks=[worker_pb2.WorkerInfo(rank=0, pid=50, last_epoch=3, last_step=7, weight_bytes=9)],
        incidents=[Incident(cause="worker_exit", reason="rank 1: <b>signal 9</b>", epoch=2)],
        recent_steps=RecentSteps(
            epoch=[3, 3],
            step=[6, 7],
            age_s=[0.5, 0.25],
            took_s=[0.02, 0.03],
            prompt_rows=[1, 0],
            decode_rows=[0, 1],
            verify_rows=[0, 2],
            num_emitted=[0, 5],
            num_accepted=[0, 2],
        ),
    )


async def test_everything_is_in_it(start_stack: StartStack) -> None:
    stack = await start_stack(served_model_name="one,two")
    stack.scheduler.status = busy()
    stack.scheduler.stats = SchedulerStats(
        num_running=3,
        num_waiting=4,
        num_blocks_total=8,
        num_blocks_used=2,
        num_blocks_cached=1,
        generation_tokens=100,
        num_drafts=10,
        num_draft_tokens=20,
        num_accepted_tokens=12,
        num_accepted_tokens_per_pos=[8, 4],
        num_incidents={"worker_exit": 1},
        drafting=[
            DraftingValue(source="proposed", rows=8, value=0.93, time_factor=1.5, num_trials=7)
        ],
        adapters=[AdapterLoad(name="poet", num_running=2, leaving=True)],
        steps=StepStats(num_windows_by_drafts=[0, 0, 10], num_windows_by_accepted=[2, 4, 4]),
    )
    seen = await until(stack, lambda o: o.schedulers[0].figures.running == 3)
    assert seen.gateway.models == ["one", "two"]
    assert seen.gateway.state == "SERVING"
    (scheduler,) = seen.schedulers
    assert scheduler.model is not None
    assert scheduler.engine is not None
    assert scheduler.model.path == "/models/tiny"
    figures = scheduler.figures
    assert (figures.waiting, figures.kv_blocks, figures.kv_blocks_used) == (4, 8, 2)
    assert (figures.drafted_at, figures.accepted_at) == ([10, 10], [8, 4])
    assert figures.windows_by_accepted == [2, 4, 4]
    assert figures.lost_epochs == 1
    (size,) = figures.drafting
    assert size.model_dump() == {
        "source": "proposed",
        "rows": 8,
        "value": 0.93,
        "drafts": False,
        "time_factor": 1.5,
        "trials": 7,
    }
    (adapter,) = figures.adapters
    assert adapter.model_dump() == {"name": "poet", "running": 2, "waiting": 0, "leaving": True}
    first, second = scheduler.engine.ranks
    assert (first.state, first.phase, first.epoch, first.restarts) == ("READY", "FORWARD", 3, 2)
    assert (second.state, second.phase, second.epoch, second.pid) == ("DEAD", None, None, 0)
    assert len(second.exits) == 5
    assert max(len(one.reason) for one in second.exits) == 500
    (incident,) = scheduler.engine.incidents
    assert (incident.cause, incident.epoch, incident.recover_s) == ("worker_exit", 2, None)
    steps = scheduler.engine.steps
    assert (steps.step, steps.verify_rows, steps.accepted) == ([6, 7], [0, 2], [0, 2])


async def test_words_of_a_newer_scheduler_are_numbers(stack: Stack) -> None:
    newer = SchedulerStatus.FromString(b"\x18\x63")  # state = 99
    stack.scheduler.status = newer
    seen = await until(stack, lambda o: o.schedulers[0].engine is not None)
    assert seen.schedulers[0].engine is not None
    assert seen.schedulers[0].engine.state == "99"


async def test_many_pages_cost_as_much_as_one(stack: Stack) -> None:
    before, began = stack.scheduler.num_status, time.monotonic()
    replies = await asyncio.gather(*(stack.client.get("/overview") for _ in range(50)))
    asked = stack.scheduler.num_status - before
    assert asked <= 1 + (time.monotonic() - began) / 0.9
    assert len({reply.content for reply in replies}) <= asked
    assert {reply.status_code for reply in replies} == {200}


async def test_rates_are_between_looks_and_never_negative(stack: Stack) -> None:
    stack.scheduler.stats = SchedulerStats(generation_tokens=1000, num_running=1)
    seen = await until(stack, lambda o: any(o.schedulers[0].history.output_tok_s))
    stack.scheduler.stats = SchedulerStats(generation_tokens=10, num_running=2)  # a new process
    seen = await until(stack, lambda o: 2 in o.schedulers[0].history.running)
    history = seen.schedulers[0].history
    assert all(rate >= 0 for rate in history.output_tok_s)
    assert max(history.output_tok_s) > 500
    assert history.age_s == sorted(history.age_s, reverse=True)
    assert len({len(column) for _, column in history}) == 1
    assert set(history.accepted) == {None}


async def test_a_scheduler_that_goes_and_comes_back(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    both = await until(stack, lambda o: all(s.history.age_s for s in o.schedulers))
    assert [s.address for s in both.schedulers] == [
        f"127.0.0.1:{scheduler.port}" for scheduler in stack.schedulers
    ]
    await stack.schedulers[1].stop()
    seen = await until(stack, lambda o: o.schedulers[1].outages)
    assert seen.schedulers[0].outages == []
    gone = seen.schedulers[1]
    assert gone.engine is None
    assert not gone.admits
    assert gone.model is not None  # as it was
    assert gone.outages[0].seconds is None
    await stack.schedulers[1].start()
    seen = await until(stack, lambda o: o.schedulers[1].engine is not None)
    seen = await until(stack, lambda o: o.schedulers[1].outages[0].seconds is not None)
    assert len(seen.schedulers[1].outages) == 1


@pytest.mark.rotates(1)
async def test_a_scheduler_that_hangs_holds_up_nobody_for_long(stack: Stack) -> None:
    stack.scheduler.hanging = True
    async with asyncio.timeout(15):
        while not stack.server.gateway.pool.schedulers[0].silent:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1)  # the last document is not fresh any more
    began = time.monotonic()
    assert (await overview(stack)).schedulers[0].engine is None
    assert time.monotonic() - began < 1.5
    stack.scheduler.hanging = False


@pytest.mark.parametrize("state", [WAITING_FOR_WORKERS, RECOVERING])
async def test_why_it_does_not_serve(start_stack: StartStack, state: Any) -> None:
    stack = await start_stack(ready=False)
    stack.scheduler.status = SchedulerStatus(state=state, waiting_for="rank 0 is loading")
    stack.scheduler.trouble = "no worker is ready: rank 0 is loading"
    await stack.scheduler.set_serving(False)
    seen = await until(stack, lambda o: o.schedulers[0].trouble and o.schedulers[0].engine)
    assert seen.gateway.state == "WAITING_FOR_SCHEDULER"
    assert seen.schedulers[0].engine is not None
    assert seen.schedulers[0].engine.waiting_for == "rank 0 is loading"
    assert seen.schedulers[0].trouble == stack.scheduler.trouble
