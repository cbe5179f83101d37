"""What schedulers tell of their steps and ranks, as Prometheus sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.processes.gateway_stack import Stack
from surestep_proto.scheduler_pb2 import (
    SERVING,
    RankSeconds,
    SchedulerStats,
    SchedulerStatus,
    StepStats,
)
from surestep_proto.supervisor_pb2 import READY, STARTING, Heartbeat, SupervisorStatus
from surestep_proto.worker_pb2 import DeviceMemory, WorkerInfo

STEPS = StepStats(
    num_steps_by_mode={"decode": 5, "verify": 6},
    num_rows_by_mode={"decode": 7, "verify": 8},
    num_rows_by_k=[7, 0, 8],
    num_windows_by_drafts=[0, 2, 6],
    num_windows_by_accepted=[1, 4, 3],
    num_checked_rows=15,
    num_checked_digests=11,
    plan_s=0.5,
    apply_s=0.25,
    bounds_s=[0.01, 0.1],
    num_steps_within=[8, 2, 1],
    step_s=1.5,
    ranks=[RankSeconds(forward_s=1.0), RankSeconds(forward_s=1.25, bubble_s=0.1)],
)
STATS = SchedulerStats(
    num_blocks_total=16,
    num_blocks_used=4,
    num_blocks_cached=2,
    num_slots_total=8,
    num_accepted_tokens_per_pos=[7, 3],
    steps=STEPS,
)
STATUS = SchedulerStatus(
    state=SERVING,
    epoch=3,
    last_step_age_s=0.5,
    num_replaying_requests=2,
    supervisors=[
        SupervisorStatus(rank=0, rank_state=READY, restarts=4, standby_pid=17),
        SupervisorStatus(rank=1, rank_state=STARTING, heartbeat=Heartbeat(age_s=2.5)),
    ],
    ranks=[
        WorkerInfo(
            rank=1,
            num_slots=8,
            state_bytes_per_slot=10,
            late_compilations=1,
            memory=DeviceMemory(limit=72, graphs=3, step=5),
        )
    ],
)

Value = Callable[..., float | None]


async def scrape(stack: Stack) -> Value:
    """The number of a metric with these labels; None where there is none."""
    text = (await stack.client.get("/metrics")).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    def value(name: str, **labels: str) -> float | None:
        found = [
            one.value
            for one in samples
            if one.name == f"surestep:{name}" and labels.items() <= one.labels.items()
        ]
        assert len(found) <= 1, (name, labels)
        return found[0] if found else None

    return value


@pytest.fixture
async def value(stack: Stack) -> Value:
    stack.scheduler.stats, stack.scheduler.status = STATS, STATUS
    return await scrape(stack)


async def test_steps_have_their_metrics(value: Value) -> None:
    assert [value("kv_blocks", state=s) for s in ("used", "cached", "free")] == [4, 2, 10]
    assert value("mode_steps_total", mode="verify") == 6
    assert value("mode_rows_total", mode="decode") == 7
    assert [value("draft_length_bucket", le=le) for le in ("0.0", "1.0", "16.0")] == [7, 7, 15]
    assert (value("draft_length_sum"), value("draft_length_count")) == (16, 15)
    assert (value("accepted_length_sum"), value("accepted_length_count")) == (10, 8)
    assert [value("drafted_per_position_total", position=p) for p in "01"] == [8, 6]
    assert [value("accepted_per_position_total", position=p) for p in "01"] == [7, 3]
    assert [value("ledger_checks_total", kind=k) for k in ("rows", "digests")] == [15, 11]
    assert [value("scheduler_seconds_total", phase=p) for p in ("plan", "apply")] == [0.5, 0.25]
    assert value("rank_seconds_total", rank="1", phase="forward") == 1.25
    assert value("rank_seconds_total", rank="1", phase="bubble") == 0.1
    assert [value("step_seconds_bucket", le=le) for le in ("0.01", "0.1", "+Inf")] == [8, 10, 11]
    assert value("step_seconds_sum") == 1.5


async def test_ranks_have_their_metrics(value: Value) -> None:
    assert (value("epoch"), value("engine_serving"), value("replaying_requests")) == (3, 1, 2)
    assert value("last_step_age_seconds") == 0.5
    assert [value("rank_ready", rank=r) for r in "01"] == [1, 0]
    assert [value("rank_standby", rank=r) for r in "01"] == [1, 0]
    assert value("rank_restarts_total", rank="0") == 4
    assert value("rank_heartbeat_age_seconds", rank="1") == 2.5
    assert value("rank_state_bytes", rank="1") == 80
    gpu = [value(f"rank_gpu_{part}_bytes", rank="1") for part in ("limit", "graph", "step")]
    assert gpu == [72, 3, 5]
    assert value("rank_late_compilations_total", rank="1") == 1


async def test_a_scheduler_that_has_counted_nothing_yet_can_be_scraped(stack: Stack) -> None:
    value = await scrape(stack)
    assert value("step_seconds_count") == 0
    assert value("rank_ready") is None
