"""The log of incidents, and the pauses before the next attempt."""

from __future__ import annotations

import pytest
from surestep_common.errors import (
    ConnectionLost,
    DeadlineExceeded,
    DrafterFault,
    InternalError,
    QueueFull,
    SurestepError,
)
from surestep_common.invariants import DigestError, LedgerError
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2
from surestep_scheduler.core.poison import NonFiniteLogits
from surestep_scheduler.core.state import Replay
from surestep_scheduler.engine.incidents import (
    Cause,
    Diagnosis,
    Incident,
    IncidentLog,
    OperatorRestart,
    diagnose,
)


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
    *,
    outside: bool = False,
) -> pb.RankExit:
    last = pb.Heartbeat(phase=phase, age_s=stood_s)
    return pb.RankExit(
        pid=pid, cause=cause, reason=f"pid {pid}", last=last, age_s=age_s, outside=outside
    )


RANKS = [worker_pb2.WorkerInfo(rank=0, pid=10), worker_pb2.WorkerInfo(rank=1, pid=11)]
WHOLE, OUTSIDE, NONE = 8, 1, 0


def diagnosed(error: SurestepError, *exits: pb.RankExit) -> Diagnosis:
    statuses = [status(rank, exit_) for rank, exit_ in enumerate(exits)]
    return diagnose(error, RANKS, statuses, supervised=True)


@pytest.mark.parametrize(
    ("exits", "cause", "reason", "weight"),
    [
        # The one that ended first drew the other with it.
        (
            [exit_(10, pb.EXITED), exit_(11, pb.KILLED, age_s=0.2)],
            "worker_exit",
            "rank 1: pid 11",
            8,
        ),
        ([exit_(10, pb.REQUESTED), exit_(11, pb.HUNG)], "worker_hang", "rank 1: pid 11", 8),
        (
            [exit_(10, pb.HUNG, pb.DRAFTING), exit_(11, pb.REQUESTED)],
            "drafter",
            "rank 0: pid 10",
            0,
        ),
        # Those of earlier epochs tell nothing: the supervisors that knew more are gone.
        ([exit_(8, pb.KILLED), exit_(9, pb.HUNG)], "connection", "socket closed", 1),
        (
            [exit_(10, pb.REQUESTED, stood_s=0.4), exit_(11, pb.REQUESTED, stood_s=0.9)],
            *("connection", "socket closed", 8),
        ),
    ],
)
def test_a_lost_stream_is_explained_by_the_exits(
    exits: list[pb.RankExit], cause: str, reason: str, weight: int
) -> None:
    assert diagnosed(ConnectionLost("socket closed"), *exits) == (cause, reason, weight)


@pytest.mark.parametrize(
    ("teller", "cause"), [(0, "worker_exit"), (1, "worker_error"), (None, "worker_exit")]
)
def test_who_tells_of_an_error_did_not_end_before_it(teller: int | None, cause: str) -> None:
    """Rank 1 raises, rank 0 is ended with it, and rank 1 then crashes for want of rank 0."""
    error = InternalError("out of memory")
    error.rank = teller
    found = diagnosed(error, exit_(10, pb.REQUESTED), exit_(11, pb.KILLED, pb.FORWARD))
    assert (found.cause, found.weight) == (cause, WHOLE)


@pytest.mark.parametrize("phase", [pb.PREPARING, pb.DRAFTING, pb.FORWARD, pb.SAMPLING, pb.IDLE])
@pytest.mark.parametrize(
    ("cause", "outside", "told"),
    [
        (pb.KILLED, True, "worker_exit"),
        (pb.KILLED, False, "worker_exit"),
        (pb.EXITED, False, "worker_exit"),
        (pb.EXITED, True, "worker_exit"),
        (pb.OUT_OF_MEMORY, False, "out_of_memory"),
        (pb.UNSEEN, False, "worker_exit"),
        (pb.HUNG, False, "worker_hang"),
        (pb.HUNG, True, "worker_hang"),
    ],
)
def test_what_a_death_says_of_those_under_way(
    cause: pb.ExitCause, outside: bool, told: str, phase: pb.Phase
) -> None:
    """A crash is theirs, somebody's signal hardly, and what happens to an idle rank less."""
    death = exit_(10, cause, phase, outside=outside)
    found = diagnosed(ConnectionLost("gone"), death, exit_(11, pb.REQUESTED))
    drafters = phase == pb.DRAFTING and not outside
    drafters &= cause not in (pb.OUT_OF_MEMORY, pb.UNSEEN)
    assert found.cause == ("drafter" if drafters else told)
    if drafters:
        assert found.weight == NONE
    elif phase == pb.IDLE and cause != pb.HUNG:
        assert found.weight == (NONE if outside else OUTSIDE)
    else:
        assert found.weight == (OUTSIDE if outside else WHOLE)


@pytest.mark.parametrize(
    ("exits", "weight"),
    [
        ([exit_(10, pb.REQUESTED), exit_(11, pb.REQUESTED)], WHOLE),
        ([exit_(10, pb.REQUESTED), exit_(11, pb.REQUESTED, outside=True)], OUTSIDE),
        # With its supervisor, which no request ends.
        ([exit_(10, pb.REQUESTED)], OUTSIDE),
        ([exit_(10, pb.EXITED)], OUTSIDE),
        ([exit_(10, pb.EXITED, pb.IDLE)], NONE),
    ],
)
def test_what_a_rank_says_that_was_left_alone(exits: list[pb.RankExit], weight: int) -> None:
    """Its group is gone: an error like any other, told before the other stream is known to end."""
    assert diagnosed(InternalError("rank 0: the collective failed"), *exits).weight == weight


def test_a_missed_deadline_is_a_hang_and_maybe_the_drafters() -> None:
    late = DeadlineExceeded("no result within 3.0 s")
    cause, reason, weight = diagnosed(late, exit_(10, pb.REQUESTED))
    assert (cause, weight) == (Cause.WORKER_HANG, WHOLE)
    assert reason == "no result within 3.0 s; rank 0 was in FORWARD for 3.0 s"
    assert diagnosed(late, exit_(10, pb.REQUESTED, pb.DRAFTING))[::2] == (Cause.DRAFTER, NONE)
    assert diagnosed(late) == (Cause.WORKER_HANG, str(late), WHOLE)
    stopped = exit_(10, pb.REQUESTED, outside=True)
    assert diagnosed(late, stopped)[::2] == (Cause.WORKER_HANG, OUTSIDE)


def test_a_rank_that_did_not_answer_pings_because_it_stood_still_hangs() -> None:
    found = diagnosed(ConnectionLost("ping timeout"), exit_(10, pb.REQUESTED, stood_s=2.1))
    reason = "ping timeout; rank 0 was in FORWARD for 2.1 s"
    assert found == (Cause.WORKER_HANG, reason, WHOLE)


def test_who_was_asked_to_leave_by_a_signal_loses_its_stream() -> None:
    """And may be restarted before it is gone."""
    leaving = exit_(10, pb.REQUESTED, stood_s=0.1, outside=True)
    found = diagnosed(ConnectionLost("cancelled"), leaving, exit_(11, pb.REQUESTED, stood_s=0.1))
    assert found == (Cause.CONNECTION, "cancelled", OUTSIDE)


def test_without_supervisors_a_lost_stream_is_all_that_is_known() -> None:
    lost = ConnectionLost("socket closed")
    expected = (Cause.CONNECTION, "socket closed", WHOLE)
    assert diagnose(lost, RANKS, [], supervised=False) == expected
    assert diagnose(lost, RANKS, [], supervised=True).weight == OUTSIDE


@pytest.mark.parametrize(
    ("error", "weight"),
    [
        (LedgerError("wrong"), WHOLE),
        (DigestError("differ"), WHOLE),
        (NonFiniteLogits("all"), NONE),
        (OperatorRestart("please"), NONE),
        (DrafterFault("odd"), NONE),
    ],
)
def test_causes_that_accuse(error: SurestepError, weight: int) -> None:
    assert diagnosed(error).weight == weight


def test_a_drafter_that_waited_for_a_rank_that_was_killed_is_not_at_fault() -> None:
    """Its collective fails: speculation goes on. Killed by the drafter itself, it is."""
    fault = DrafterFault("the drafter failed: connection reset by peer")
    fault.rank = 0
    killed = exit_(11, pb.KILLED, pb.DRAFTING, outside=True)
    assert diagnosed(fault, exit_(10, pb.REQUESTED), killed)[::2] == (Cause.WORKER_EXIT, OUTSIDE)
    crashed = exit_(11, pb.KILLED, pb.DRAFTING)
    assert diagnosed(fault, exit_(10, pb.REQUESTED), crashed)[::2] == (Cause.DRAFTER, NONE)
    alone = exit_(10, pb.REQUESTED), exit_(11, pb.REQUESTED)
    assert diagnosed(fault, *alone)[::2] == (Cause.DRAFTER, NONE)


def test_any_other_answer_is_the_workers_error() -> None:
    exits = exit_(10, pb.REQUESTED, stood_s=2.1), exit_(11, pb.REQUESTED)
    found = diagnosed(QueueFull("too large"), *exits)
    assert (found.cause, found.weight) == (Cause.WORKER_ERROR, WHOLE)
