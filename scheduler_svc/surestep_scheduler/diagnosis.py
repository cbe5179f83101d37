"""Why an epoch was lost: what the scheduler saw, and what the supervisors know about the ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from surestep_common.errors import DeadlineExceeded, DrafterFault, SurestepError, Unavailable
from surestep_common.invariants import DigestError, LedgerError
from surestep_proto import engine_pb2 as pb

from .incidents import Cause
from .non_finite import NonFiniteLogits

_STILL_S = 1.5  # three ticks of an idle rank, and less than a connection waits for a ping's answer


class OperatorRestart(SurestepError):
    """Somebody asked for new workers."""


class Diagnosis(NamedTuple):
    """Cause of a lost epoch, and a line for people."""

    cause: Cause
    reason: str


class _Death(NamedTuple):
    rank: int
    exit: pb.RankExit


_TOLD = (
    (OperatorRestart, Cause.OPERATOR),
    (NonFiniteLogits, Cause.NON_FINITE),
    (DrafterFault, Cause.DRAFTER),
    (DigestError, Cause.DIGEST),
    (LedgerError, Cause.LEDGER),
)


def diagnose(
    error: SurestepError,
    ranks: Sequence[pb.WorkerInfo],
    statuses: Sequence[pb.SupervisorStatus],
) -> Diagnosis:
    """`error` ended the epoch of `ranks`; `statuses` were asked for when their processes were gone.

    A lost stream and a missed deadline are symptoms: the supervisors know whether a rank ended by
    itself or stood still, and whether it was drafting then.
    """
    for kind, cause in _TOLD:
        if isinstance(error, kind):
            return Diagnosis(cause, str(error))
    deaths = _deaths(ranks, statuses)
    own = [death for death in deaths if death.exit.cause != pb.REQUESTED]
    if own:
        first = max(own, key=lambda death: death.exit.age_s)
        hung = first.exit.cause == pb.HUNG
        cause = Cause.WORKER_HANG if hung else Cause.WORKER_EXIT
        reason = f"rank {first.rank}: {first.exit.reason}"
        return Diagnosis(Cause.DRAFTER if _drafting(first) else cause, reason)
    lost = isinstance(error, Unavailable)
    if isinstance(error, DeadlineExceeded) or (lost and any(map(_stood_still, deaths))):
        cause = Cause.DRAFTER if any(map(_drafting, deaths)) else Cause.WORKER_HANG
        return Diagnosis(cause, "; ".join([str(error), *map(_last_sign, deaths)]))
    return Diagnosis(Cause.CONNECTION if lost else Cause.WORKER_ERROR, str(error))


def _deaths(
    ranks: Sequence[pb.WorkerInfo], statuses: Sequence[pb.SupervisorStatus]
) -> list[_Death]:
    pids = {info.rank: info.pid for info in ranks}
    return [
        _Death(status.rank, exit_)
        for status in statuses
        for exit_ in status.exits
        if exit_.pid == pids.get(status.rank)
    ]


def _drafting(death: _Death) -> bool:
    """It ended in the drafter, and not because somebody from outside killed it there."""
    return death.exit.last.phase == pb.DRAFTING and death.exit.signal != signal.SIGKILL


def _stood_still(death: _Death) -> bool:
    """It had not ticked for so long that it could not answer the pings of its connection either."""
    return death.exit.last.age_s > _STILL_S


def _last_sign(death: _Death) -> str:
    last = death.exit.last
    return f"rank {death.rank} was in {pb.Phase.Name(last.phase)} for {last.age_s:.1f} s"
