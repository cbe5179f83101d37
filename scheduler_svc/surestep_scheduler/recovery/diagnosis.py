"""Why an epoch was lost: what the scheduler saw, and what the supervisors know about the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from surestep_common.errors import DeadlineExceeded, DrafterFault, SurestepError, Unavailable
from surestep_common.invariants import DigestError, LedgerError
from surestep_common.other_releases import name_of
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_scheduler.recovery.poison import NonFiniteLogits

from .incidents import Cause
from .poison import NO_LOSS, OUTSIDE_LOSS, WHOLE_LOSS

_STILL_S = 1.5  # three ticks of an idle rank, and less than a connection waits for a ping's answer


class OperatorRestart(SurestepError):
    """An operator asked for new workers."""


class Diagnosis(NamedTuple):
    """Cause of a lost epoch, a line for people, and how much it says of those under way."""

    cause: Cause
    reason: str
    weight: int = WHOLE_LOSS  # in eighths of a loss


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
    ranks: Sequence[worker_pb2.WorkerInfo],
    statuses: Sequence[pb.SupervisorStatus],
    *,
    supervised: bool,
) -> Diagnosis:
    """Find out why `error` ended the epoch of `ranks`; `statuses` date from after their end.

    A lost stream and a missed deadline are symptoms: the supervisors know whether a rank ended by
    itself or stood still, and whether it was drafting then. Where ranks are `supervised` and it is
    not known how one ended, its supervisor is gone too, which no request can do.
    """
    deaths = _deaths(ranks, statuses)
    lost, outside = isinstance(error, Unavailable), any(death.exit.outside for death in deaths)
    teller = None if lost else error.rank  # it lived when that was wrong, however it ended then
    own = [d for d in deaths if d.exit.cause != pb.REQUESTED and d.rank != teller]
    # A drafter fails as well when a rank that it waits for has ended.
    for kind, cause in () if own and isinstance(error, DrafterFault) else _TOLD:
        if isinstance(error, kind):
            return Diagnosis(
                cause, str(error), NO_LOSS if not cause.implicates_requests else WHOLE_LOSS
            )
    unknown = supervised and len(deaths) < len(ranks)
    if own:
        return _of_exit(max(own, key=lambda death: death.exit.age_s), unknown=unknown)
    if isinstance(error, DeadlineExceeded) or (lost and any(map(_stood_still, deaths))):
        reason = "; ".join([str(error), *map(_last_sign, deaths)])
        if any(map(_drafting, deaths)):
            return Diagnosis(Cause.DRAFTER, reason, NO_LOSS)
        return Diagnosis(Cause.WORKER_HANG, reason, OUTSIDE_LOSS if outside else WHOLE_LOSS)
    # Ranks that are left without another one say so first, by whatever error that is to them.
    cause = Cause.CONNECTION if lost else Cause.WORKER_ERROR
    return Diagnosis(cause, str(error), OUTSIDE_LOSS if outside or unknown else WHOLE_LOSS)


_CAUSES = {pb.HUNG: Cause.WORKER_HANG, pb.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY}


def _of_exit(death: _Death, *, unknown: bool) -> Diagnosis:
    """Diagnose by the rank that ended first by itself; `unknown`: perhaps another did."""
    cause = _CAUSES.get(death.exit.cause, Cause.WORKER_EXIT)
    reason, weight = f"rank {death.rank}: {death.exit.reason}", WHOLE_LOSS
    if _drafting(death):
        return Diagnosis(Cause.DRAFTER, reason, NO_LOSS)
    if death.exit.outside or unknown:
        weight = OUTSIDE_LOSS
    if cause is not Cause.WORKER_HANG and death.exit.last.phase == pb.IDLE:
        # No step explains it; but what a step has spoilt may show when it is over.
        weight = NO_LOSS if weight == OUTSIDE_LOSS else OUTSIDE_LOSS
    return Diagnosis(cause, reason, weight)


def _deaths(
    ranks: Sequence[worker_pb2.WorkerInfo], statuses: Sequence[pb.SupervisorStatus]
) -> list[_Death]:
    pids = {info.rank: info.pid for info in ranks}
    return [
        _Death(status.rank, exit_)
        for status in statuses
        for exit_ in status.exits
        if exit_.pid == pids.get(status.rank)
    ]


def _drafting(death: _Death) -> bool:
    """Return whether it ended in the drafter, and was not killed there from outside."""
    killed = death.exit.outside or death.exit.cause == pb.OUT_OF_MEMORY
    return death.exit.last.phase == pb.DRAFTING and not killed


def _stood_still(death: _Death) -> bool:
    """Return whether it had not ticked for so long that it could not answer pings either."""
    return death.exit.last.age_s > _STILL_S


def _last_sign(death: _Death) -> str:
    last = death.exit.last
    return f"rank {death.rank} was in {name_of(pb.Phase, last.phase)} for {last.age_s:.1f} s"
