"""The status of a scheduler and its ranks, as the objects of GET /overview."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator
from surestep_common.releases import name_of
from surestep_proto.scheduler_pb2 import EngineState, Incident, RecentSteps, SchedulerStatus
from surestep_proto.supervisor_pb2 import ExitCause, Phase, RankState, SupervisorStatus
from surestep_proto.worker_pb2 import DeviceMemory, WorkerInfo

_TEXT = 500  # characters
_EXITS = 5

Line = Annotated[str, BeforeValidator(lambda text: text[:_TEXT])]


def _sizes(memory: DeviceMemory) -> dict[str, int]:
    return {field.name: getattr(memory, field.name) for field in memory.DESCRIPTOR.fields}


class ExitView(BaseModel):
    """A process of a rank that has ended."""

    age_s: float
    pid: int
    cause: str
    reason: Line
    replaced_s: float | None  # None: not yet


class RankView(BaseModel):
    """A rank, as its supervisor or the rank itself reports it."""

    rank: int
    pid: int  # 0 while there is none
    state: str  # STARTING, READY, DEAD, ASLEEP
    phase: str | None  # what it is doing; None without a supervisor
    heartbeat_age_s: float | None
    epoch: int | None  # None: it does not answer, as the next two
    step: int | None
    step_age_s: float | None
    restarts: int
    standby: bool  # a process waits to become the rank
    failure: Line  # why it cannot start; empty while it can
    failure_is_permanent: bool
    weight_bytes: int | None
    kv_cache_bytes: int | None
    gpu_memory: dict[str, int] | None  # bytes by what they are for; None on CPUs
    exits: list[ExitView]  # newest first

    @classmethod
    def of(cls, rank: int, told: SupervisorStatus | None, info: WorkerInfo | None) -> RankView:
        """Combine both reports, of which at least one is present."""
        supervisor = told or SupervisorStatus(rank=rank, rank_state=RankState.READY)
        beats = told is not None and told.HasField("heartbeat")
        return cls(
            rank=rank,
            pid=supervisor.rank_pid or (info.pid if info else 0),
            state=name_of(RankState, supervisor.rank_state),
            phase=name_of(Phase, supervisor.heartbeat.phase) if beats else None,
            heartbeat_age_s=supervisor.heartbeat.age_s if beats else None,
            epoch=info.last_epoch if info else None,
            step=info.last_step if info else None,
            step_age_s=info.last_step_age_s if info else None,
            restarts=supervisor.restarts,
            standby=supervisor.standby_pid > 0,
            failure=supervisor.failure,
            failure_is_permanent=supervisor.failure_is_permanent,
            weight_bytes=info.weight_bytes if info else None,
            kv_cache_bytes=info.kv_cache_bytes if info else None,
            gpu_memory=_sizes(info.memory) if info and info.HasField("memory") else None,
            exits=[
                ExitView(
                    age_s=one.age_s,
                    pid=one.pid,
                    cause=name_of(ExitCause, one.cause),
                    reason=one.reason,
                    replaced_s=one.replaced_s or None,
                )
                for one in supervisor.exits[:_EXITS]
            ],
        )


class IncidentView(BaseModel):
    """An epoch that was lost."""

    cause: str
    reason: Line
    epoch: int
    age_s: float  # since it was noticed
    detect_s: float
    recover_s: float | None  # None: not yet
    replayed_requests: int
    replayed_tokens: int

    @classmethod
    def of(cls, incident: Incident) -> IncidentView:
        return cls(
            cause=incident.cause,
            reason=incident.reason,
            epoch=incident.epoch,
            age_s=incident.age_s,
            detect_s=incident.detect_s,
            recover_s=incident.recover_s or None,
            replayed_requests=incident.num_replayed_requests,
            replayed_tokens=incident.num_replayed_tokens,
        )


class StepsView(BaseModel):
    """The latest steps in parallel columns, oldest first; see RecentSteps in scheduler.proto."""

    epoch: list[int]
    step: list[int]
    age_s: list[float]
    took_s: list[float]
    prompt_rows: list[int]
    decode_rows: list[int]
    verify_rows: list[int]
    emitted: list[int]
    accepted: list[int]

    @classmethod
    def of(cls, steps: RecentSteps) -> StepsView:
        """Return the columns, with times rounded to milliseconds."""
        return cls(
            epoch=list(steps.epoch),
            step=list(steps.step),
            age_s=[round(age, 3) for age in steps.age_s],
            took_s=[round(took, 4) for took in steps.took_s],
            prompt_rows=list(steps.prompt_rows),
            decode_rows=list(steps.decode_rows),
            verify_rows=list(steps.verify_rows),
            emitted=list(steps.num_emitted),
            accepted=list(steps.num_accepted),
        )


class EngineView(BaseModel):
    """The scheduler and its ranks, as the scheduler reports them."""

    pid: int
    state: str
    epoch: int
    step: int
    last_step_age_s: float
    waiting_for: Line  # why it does not serve; empty while it does
    open_requests: int
    replaying_requests: int
    ranks: list[RankView]
    incidents: list[IncidentView]  # newest first
    steps: StepsView

    @classmethod
    def of(cls, status: SchedulerStatus) -> EngineView:
        told = {one.rank: one for one in status.supervisors}
        infos = {one.rank: one for one in status.ranks}
        return cls(
            pid=status.pid,
            state=name_of(EngineState, status.state),
            epoch=status.epoch,
            step=status.step,
            last_step_age_s=status.last_step_age_s,
            waiting_for=status.waiting_for,
            open_requests=status.num_open_requests,
            replaying_requests=status.num_replaying_requests,
            ranks=[
                RankView.of(rank, told.get(rank), infos.get(rank))
                for rank in sorted(told.keys() | infos.keys())
            ],
            incidents=list(map(IncidentView.of, status.incidents)),
            steps=StepsView.of(status.recent_steps),
        )
