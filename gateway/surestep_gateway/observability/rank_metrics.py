"""The ranks behind each scheduler, as it reports them, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from surestep_proto.scheduler_pb2 import SERVING, SchedulerStatus
from surestep_proto.supervisor_pb2 import READY, SupervisorStatus
from surestep_proto.worker_pb2 import WorkerInfo

from .metric_families import Field, Kind, Labelled, Split, family, split_family

_GAUGES: tuple[Field[SchedulerStatus], ...] = (
    Field("surestep:epoch", "Newest epoch.", lambda s: s.epoch),
    Field(
        "surestep:engine_serving",
        "Whether the engine steps: all ranks are there, and it does not drain.",
        lambda s: s.state == SERVING,
    ),
    Field(
        "surestep:last_step_age_seconds",
        "Since a step was finished; 0 before the first.",
        lambda s: s.last_step_age_s,
    ),
    Field(
        "surestep:replaying_requests",
        "Open requests that have emitted nothing since their last replay.",
        lambda s: s.num_replaying_requests,
    ),
)


class _OfSupervisor(NamedTuple):
    kind: Kind
    name: str
    text: str
    value: Callable[[SupervisorStatus], float]


class _OfRank(NamedTuple):
    kind: Kind
    name: str
    text: str
    value: Callable[[WorkerInfo], float]


_OF_SUPERVISORS = (
    _OfSupervisor(
        GaugeMetricFamily,
        "surestep:rank_ready",
        "Whether the rank has its model and takes plans.",
        lambda s: s.rank_state == READY,
    ),
    _OfSupervisor(
        GaugeMetricFamily,
        "surestep:rank_heartbeat_age_seconds",
        "Since the rank gave a sign of life.",
        lambda s: s.heartbeat.age_s,
    ),
    _OfSupervisor(
        CounterMetricFamily,
        "surestep:rank_restarts",
        "Processes of the rank that were replaced.",
        lambda s: s.restarts,
    ),
    _OfSupervisor(
        GaugeMetricFamily,
        "surestep:rank_standby",
        "Whether a process waits to become the rank.",
        lambda s: s.standby_pid > 0,
    ),
    _OfSupervisor(
        GaugeMetricFamily,
        "surestep:rank_held_weight_bytes",
        "Weights in shared memory that the next process of the rank will map.",
        lambda s: s.held_weight_bytes,
    ),
)
_OF_RANKS = (
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_weight_bytes",
        "Memory of the rank's weights.",
        lambda i: i.weight_bytes,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_kv_cache_bytes",
        "Memory of the rank's KV cache.",
        lambda i: i.kv_cache_bytes,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_state_bytes",
        "Recurrent state and records of all slots.",
        lambda i: i.state_bytes_per_slot * i.num_slots,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_gpu_limit_bytes",
        "Memory of its GPU that the rank may take; 0 on CPUs.",
        lambda i: i.memory.limit,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_gpu_graph_bytes",
        "Memory of its GPU that captured steps take; 0 on CPUs.",
        lambda i: i.memory.graphs,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_gpu_step_bytes",
        "Memory of its GPU that the largest step takes; 0 on CPUs.",
        lambda i: i.memory.step,
    ),
    _OfRank(
        CounterMetricFamily,
        "surestep:rank_late_compilations",
        "Kernels compiled while serving, each of which has held up a step.",
        lambda i: i.late_compilations,
    ),
    _OfRank(
        GaugeMetricFamily,
        "surestep:rank_captured_shapes",
        "Kinds of step that are one launch on a GPU; more as the rank serves.",
        lambda i: i.captured_shapes,
    ),
    _OfRank(
        CounterMetricFamily,
        "surestep:rank_uncaptured_steps",
        "Steps launched kernel by kernel, on a rank that captures any.",
        lambda i: i.uncaptured_steps,
    ),
)


def rank_families(labelled: Labelled[SchedulerStatus]) -> Iterator[Metric]:
    """Yield all families in a stable order; unreachable ranks and supervisors have no samples."""
    for gauge in _GAUGES:
        yield family(GaugeMetricFamily, gauge, labelled)
    for one in _OF_SUPERVISORS:
        yield split_family(one.kind, _by_supervisor(one), labelled)
    for each in _OF_RANKS:
        yield split_family(each.kind, _by_rank(each), labelled)


def _by_supervisor(of: _OfSupervisor) -> Split[SchedulerStatus]:
    def values(status: SchedulerStatus) -> Iterable[tuple[tuple[str], float]]:
        return (((str(one.rank),), of.value(one)) for one in status.supervisors)

    return Split(of.name, of.text, ("rank",), values)


def _by_rank(of: _OfRank) -> Split[SchedulerStatus]:
    def values(status: SchedulerStatus) -> Iterable[tuple[tuple[str], float]]:
        return (((str(one.rank),), of.value(one)) for one in status.ranks)

    return Split(of.name, of.text, ("rank",), values)
