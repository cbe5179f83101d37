"""The log of incidents, and the pauses before the next attempt."""

from __future__ import annotations

import pytest
from surestep_common.errors import ConnectionLost, DeadlineExceeded, QueueFull
from surestep_proto import engine_pb2 as pb
from surestep_scheduler.diagnosis import diagnose
from surestep_scheduler.incidents import Cause, Incident, IncidentLog, Replay


def incident(epoch: int, at: float = 0.0) -> Incident:
    return Incident(Cause.WORKER_EXIT, "SIGKILL", epoch, at, 0.5, Replay(2, 30))


def test_totals_and_the_latest() -> None:
    log = IncidentLog()
    for epoch in range(60):
        log.lost(incident(epoch, at=10.0 * epoch))
        assert log.pending
        (over,) = log.recovered(10.0 * epoch + 2)
        assert over.recover_s == 2
        assert not log.pending
    assert [entry.epoch for entry in log.latest] == list(range(59, 9, -1))
    assert log.by_cause == {Cause.WORKER_EXIT: 60}
    assert (log.detect_s, log.recover_s, log.num_recoveries) == (30, 120, 60)
    assert log.replayed_tokens == 1800


def test_losses_without_a_step_between_recover_together() -> None:
    log = IncidentLog()
    log.lost(incident(1, at=10))
    log.lost(incident(2, at=14))
    assert [entry.recover_s for entry in log.recovered(15)] == [5, 1]
    assert log.recovered(16) == []


def test_pauses_grow_while_there_is_no_step() -> None:
    log, pauses = IncidentLog(), []
    for epoch in range(12):
        log.lost(incident(epoch))
        pauses.append(log.pause_s)
    assert pauses == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    log.recovered(1)
    log.lost(incident(99))
    assert log.pause_s == 0


def status(rank: int, *exits: pb.RankExit) -> pb.SupervisorStatus:
    return pb.SupervisorStatus(rank=rank, exits=exits)


def exit_(
    pid: int,
    cause: pb.ExitCause,
    phase: pb.Phase = pb.FORWARD,
    age_s: float = 0.1,
    stood_s: float = 3,
) -> pb.RankExit:
    last = pb.Heartbeat(phase=phase, age_s=stood_s)
    return pb.RankExit(pid=pid, cause=cause, reason=f"pid {pid}", last=last, age_s=age_s)


RANKS = [pb.WorkerInfo(rank=0, pid=10), pb.WorkerInfo(rank=1, pid=11)]


@pytest.mark.parametrize(
    ("exits", "cause", "reason"),
    [
        # The one that ended first drew the other with it.
        ([exit_(10, pb.EXITED), exit_(11, pb.KILLED, age_s=0.2)], "worker_exit", "rank 1: pid 11"),
        ([exit_(10, pb.REQUESTED), exit_(11, pb.HUNG)], "worker_hang", "rank 1: pid 11"),
        ([exit_(10, pb.HUNG, pb.DRAFTING), exit_(11, pb.REQUESTED)], "drafter", "rank 0: pid 10"),
        # Those of earlier epochs tell nothing.
        ([exit_(8, pb.KILLED), exit_(9, pb.HUNG)], "connection", "socket closed"),
        (
            [exit_(10, pb.REQUESTED, stood_s=0.4), exit_(11, pb.REQUESTED, stood_s=0.9)],
            *("connection", "socket closed"),
        ),
    ],
)
def test_a_lost_stream_is_explained_by_the_exits(
    exits: list[pb.RankExit], cause: str, reason: str
) -> None:
    statuses = [status(rank, exit_) for rank, exit_ in enumerate(exits)]
    assert diagnose(ConnectionLost("socket closed"), RANKS, statuses) == (cause, reason)


def test_a_missed_deadline_is_a_hang_and_maybe_the_drafters() -> None:
    late = DeadlineExceeded("no result within 3.0 s")
    asked = [status(0, exit_(10, pb.REQUESTED)), status(1)]
    cause, reason = diagnose(late, RANKS, asked)
    assert cause is Cause.WORKER_HANG
    assert reason == "no result within 3.0 s; rank 0 was in FORWARD for 3.0 s"
    drafting = [status(0, exit_(10, pb.REQUESTED, pb.DRAFTING)), status(1)]
    assert diagnose(late, RANKS, drafting).cause is Cause.DRAFTER
    assert diagnose(late, RANKS, []) == (Cause.WORKER_HANG, str(late))


def test_a_rank_that_did_not_answer_pings_because_it_stood_still_hangs() -> None:
    lost = ConnectionLost("ping timeout")
    statuses = [status(0, exit_(10, pb.REQUESTED, stood_s=2.1)), status(1)]
    reason = "ping timeout; rank 0 was in FORWARD for 2.1 s"
    assert diagnose(lost, RANKS, statuses) == (Cause.WORKER_HANG, reason)


def test_any_other_answer_is_the_workers_error() -> None:
    slow = [status(0, exit_(10, pb.REQUESTED, stood_s=2.1))]
    for statuses in ([], slow):
        assert diagnose(QueueFull("too large"), RANKS, statuses).cause is Cause.WORKER_ERROR
