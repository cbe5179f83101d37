"""Lost epochs: why, how long it took to notice and to recover, and what had to be done again.

Why is told by what the scheduler saw, and by what the supervisors know about the ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from surestep_common.errors import DeadlineExceeded, DrafterFault, SurestepError, Unavailable
from surestep_common.invariants import DigestError, LedgerError
from surestep_common.releases import name_of
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_scheduler.core.poison import NO_LOSS, OUTSIDE_LOSS, WHOLE_LOSS, NonFiniteLogits
from surestep_scheduler.core.state import Replay

_KEPT = 50
_AT_ONCE = 3  # losses in a row without a step after which it is tried again at once
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Cause(StrEnum):
    """Why an epoch was lost; see Incident in scheduler.proto."""

    WORKER_EXIT = "worker_exit"
    WORKER_HANG = "worker_hang"
    WORKER_ERROR = "worker_error"
    OUT_OF_MEMORY = "out_of_memory"
    CONNECTION = "connection"
    LEDGER = "ledger"
    DIGEST = "digest"
    NON_FINITE = "non_finite"
    DRAFTER = "drafter"
    OPERATOR = "operator"

    @property
    def implicates_requests(self) -> bool:
        """Return whether a request that was under way may be the cause."""
        return self not in (Cause.NON_FINITE, Cause.DRAFTER, Cause.OPERATOR)

    @property
    def spares_caches(self) -> bool:
        """Return whether what the workers had computed before is not in doubt."""
        return self not in (Cause.WORKER_ERROR, Cause.LEDGER, Cause.DIGEST, Cause.NON_FINITE)


@dataclass(slots=True)
class Incident:
    """Lost epoch. `noticed_at` is on the scheduler's clock."""

    cause: Cause
    reason: str
    epoch: int
    noticed_at: float
    detect_s: float  # in which workers had work to do, and their end was not noticed
    replay: Replay
    recover_s: float | None = None  # from being noticed to the next step; None = not yet
    num_kept: int = 0  # of the replayed tokens, those that were not computed again


class IncidentLog:
    """The latest incidents, and totals over all of them."""

    def __init__(self) -> None:
        self.latest: deque[Incident] = deque(maxlen=_KEPT)  # newest first
        self.by_cause: Counter[Cause] = Counter()
        self.detect_s = 0.0
        self.recover_s = 0.0
        self.num_recoveries = 0
        self.replayed_tokens = 0
        self._open: list[Incident] = []  # that no step has followed yet

    @property
    def pending(self) -> bool:
        """Return whether the workers have not shown yet that they are back."""
        return bool(self._open)

    @property
    def num_open(self) -> int:
        """Number of losses in a row that no step has followed."""
        return len(self._open)

    @property
    def pause_s(self) -> float:
        """Seconds before the next attempt, more and more for workers that come to no step."""
        doublings = len(self._open) - _AT_ONCE
        return 0.0 if doublings < 0 else min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)

    def lost(self, incident: Incident) -> None:
        """Record the loss of an epoch."""
        self.latest.appendleft(incident)
        self.by_cause[incident.cause] += 1
        self.detect_s += incident.detect_s
        self.replayed_tokens += incident.replay.num_tokens
        self._open.append(incident)

    def kept(self, num_tokens: int) -> None:
        """Record how many tokens of the newest loss, if it is not over, outlived the workers."""
        if self._open:
            self.replayed_tokens -= num_tokens - self._open[-1].num_kept
            self._open[-1].num_kept = num_tokens

    def recovered(self, now: float) -> list[Incident]:
        """Close the open incidents after a step was applied; return them, oldest first."""
        over, self._open = self._open, []
        for incident in over:
            incident.recover_s = now - incident.noticed_at
            self.recover_s += incident.recover_s
            self.num_recoveries += 1
        return over


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
    """Return whether it ended in the drafter, and is known not to be killed there from outside."""
    killed = death.exit.outside or death.exit.cause in (pb.OUT_OF_MEMORY, pb.UNSEEN)
    return death.exit.last.phase == pb.DRAFTING and not killed


def _stood_still(death: _Death) -> bool:
    """Return whether it had not ticked for so long that it could not answer pings either."""
    return death.exit.last.age_s > _STILL_S


def _last_sign(death: _Death) -> str:
    last = death.exit.last
    return f"rank {death.rank} was in {name_of(pb.Phase, last.phase)} for {last.age_s:.1f} s"
