"""What `surestep status` prints."""

from __future__ import annotations

from typing import Any

from surestep_cli.monitor.status import remarks, rows
from surestep_gateway.apis.operators.routes import as_json
from surestep_proto.scheduler_pb2 import SERVING, Incident, SchedulerStatus
from surestep_proto.supervisor_pb2 import (
    HUNG,
    READY,
    SAMPLING,
    Heartbeat,
    RankExit,
    SupervisorStatus,
)
from surestep_proto.worker_pb2 import WorkerInfo

GATEWAY = {"pid": 1, "address": "g:1", "state": "SERVING"}
ANSWERS: dict[str, Any] = {"answers": 9, "failed": {}, "failed_in_streams": 0}
SUPERVISOR = SupervisorStatus(
    pid=3,
    address="v:3",
    rank=0,
    rank_state=READY,
    rank_pid=4,
    rank_address="r:4",
    restarts=2,
    standby_pid=5,
    heartbeat=Heartbeat(epoch=3, step=9, phase=SAMPLING, age_s=0.5),
)
RANK = WorkerInfo(rank=0, pid=4, last_epoch=3, last_step=9, last_step_age_s=0.25)


def document(*schedulers: SchedulerStatus | None) -> dict[str, Any]:
    """Return the status as the gateway writes it."""
    shown = [
        {
            "url": f"s:{number}",
            "circuit_breaker": "CLOSED",
            "status": None if status is None else as_json(status),
        }
        for number, status in enumerate(schedulers)
    ]
    return {"gateway": GATEWAY, "answers": ANSWERS, "schedulers": shown}


def scheduler(**changes: Any) -> SchedulerStatus:
    facts: dict[str, Any] = {"pid": 2, "address": "s:2", "state": SERVING, "epoch": 3, "step": 9}
    lists: dict[str, Any] = {"last_step_age_s": 0.25, "supervisors": [SUPERVISOR], "ranks": [RANK]}
    return SchedulerStatus(**facts | lists | changes)


def test_everything_runs() -> None:
    assert [tuple(row) for row in rows(document(scheduler()))] == [
        ("gateway", "1", "g:1", "SERVING", "-", "-"),
        ("scheduler", "2", "s:2", "SERVING", "3", "0.2 s ago (#9)"),
        ("supervisor 0", "3", "v:3", "UP, 2 restarts, standby 5", "-", "-"),
        ("rank 0", "4", "r:4", "READY, SAMPLING for 0.5 s", "3", "0.2 s ago (#9)"),
    ]


def test_one_of_two_schedulers_is_gone() -> None:
    table = list(rows(document(scheduler(supervisors=[], ranks=[]), None)))
    assert [row.name for row in table] == ["gateway", "scheduler 0", "scheduler 1"]
    assert tuple(table[2]) == ("scheduler 1", "-", "s:1", "SILENT", "-", "-")


def test_an_open_breaker_shows() -> None:
    status = document(scheduler())
    status["schedulers"][0]["circuit_breaker"] = "OPEN"
    assert list(rows(status))[1].state == "SERVING, circuit breaker OPEN"


def test_a_rank_that_does_not_answer() -> None:
    table = list(rows(document(scheduler(ranks=[]))))
    assert tuple(table[-1]) == ("rank 0", "4", "r:4", "READY, SAMPLING for 0.5 s", "-", "-")


def test_ranks_without_supervisors() -> None:
    table = list(rows(document(scheduler(supervisors=[]))))
    assert table[-1].name == "rank 0"
    assert table[-1].pid == "4"


def test_schedulers_of_several_models_say_whose_they_are() -> None:
    status = document(scheduler(), None)
    for one, name in zip(status["schedulers"], ("small", "large"), strict=True):
        one["model"] = name
    names = [row.name for row in rows(status) if row.name.startswith("scheduler")]
    assert names == ["scheduler 0: small", "scheduler 1: large"]
    assert next(iter(remarks(status))) == "s:0 (small): 0 open requests"


def test_what_went_wrong_in_plain_words() -> None:
    hang = Incident(
        cause="worker_hang",
        reason="rank 0 was FORWARD for 5.0 s",
        epoch=2,
        age_s=61,
        detect_s=5,
        recover_s=0.8,
        num_replayed_requests=16,
    )
    going_on = Incident(cause="ledger", reason="a row is missing", epoch=3, age_s=0.6)
    ended = RankExit(pid=9, cause=HUNG, reason="signal SIGKILL", age_s=7300, replaced_s=0.7)
    supervisor = SupervisorStatus(exits=[ended])
    status = scheduler(
        incidents=[going_on, hang],
        supervisors=[supervisor],
        num_open_requests=17,
        num_replaying_requests=16,
    )
    assert list(remarks(document(status, None))) == [
        "s:0: 17 open requests, 16 of them replaying",
        "  1 s ago: epoch 3 was lost (ledger: a row is missing); noticed after 0.0 s, not over yet, 0 requests replayed",
        "  1 min ago: epoch 2 was lost (worker_hang: rank 0 was FORWARD for 5.0 s); noticed after 5.0 s, serving again after 0.8 s, 16 requests replayed",
        "  2.0 h ago: rank 0, pid 9, ended (HUNG: signal SIGKILL), replaced in 0.7 s",
    ]


def test_a_server_that_serves_and_whose_answers_fail() -> None:
    failed = {"answers": 9, "failed": {"timeout": 2, "server_error": 1}, "failed_in_streams": 2}
    assert next(remarks(document(scheduler()) | {"answers": failed})) == (
        "3 of 9 answers failed in the last minute (server_error 1, timeout 2), 2 of them inside streams"
    )


def test_what_a_server_lacks_is_said_in_words() -> None:
    broken = SupervisorStatus(
        rank=1, failure="model.safetensors: cut off", failure_is_permanent=True
    )
    passing = SupervisorStatus(rank=0, failure="signal SIGKILL")
    waiting = "rank 0 is starting: signal SIGKILL"
    shown = list(remarks(document(scheduler(waiting_for=waiting, supervisors=[passing, broken]))))
    assert shown == [
        "s:0: 0 open requests",
        "  does not serve: rank 0 is starting: signal SIGKILL",
        "  rank 0 cannot start and is tried again: signal SIGKILL",
        "  rank 1 cannot start and needs a change: model.safetensors: cut off",
    ]
