"""The schedulers' numbers as Prometheus metrics.

Under our names there is one sample per scheduler: `engine` numbers them, `scheduler` names them.
Under vLLM's there is one for all: `vllm_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from surestep_proto.generate_pb2 import SchedulerInfo, SchedulerStats

from .breaker import BreakerState
from .vllm_metrics import Answer, EngineMetrics

_LABELS = ("model_name", "engine", "scheduler")
_Labels = tuple[str, str, str]  # their values
_Labelled = tuple[_Labels, SchedulerStats]


class SchedulerReading(NamedTuple):
    """One scheduler at one moment."""

    address: str
    breaker: BreakerState
    stats: SchedulerStats | None  # None: no answer
    info: SchedulerInfo | None  # None: it has never served


class _Field(NamedTuple):
    name: str
    text: str
    value: Callable[[SchedulerStats], float]


_GAUGES = (
    _Field("surestep:requests_running", "Requests in slots.", lambda s: s.num_running),
    _Field("surestep:requests_waiting", "Requests queued.", lambda s: s.num_waiting),
    _Field(
        "surestep:kv_cache_usage",
        "Share of KV blocks in use, 0 to 1.",
        lambda s: s.num_blocks_used / max(1, s.num_blocks_total),
    ),
    _Field(
        "surestep:speculation_suspended",
        "1 while drafts are suspended because acceptance has collapsed.",
        lambda s: s.speculation_suspended,
    ),
    _Field(
        "surestep:queued_tokens", "Tokens of the requests that wait.", lambda s: s.num_queued_tokens
    ),
    _Field(
        "surestep:last_token_age_seconds",
        "Since a token was emitted, by a canary if nobody else; 0 before the first.",
        lambda s: s.last_token_age_s,
    ),
    _Field("surestep:tenants", "Tenants with open requests.", lambda s: s.num_tenants),
    _Field("surestep:slots_used", "Slots held by requests.", lambda s: s.num_slots_used),
    _Field("surestep:step_time_p50_seconds", "Median step.", lambda s: s.step_time_p50_s),
    _Field("surestep:step_time_p99_seconds", "Slow step.", lambda s: s.step_time_p99_s),
    _Field(
        "surestep:step_gap_p50_seconds",
        "Median time between two steps in which workers with work to do waited.",
        lambda s: s.step_gap_p50_s,
    ),
    _Field("surestep:step_gap_p99_seconds", "Long one.", lambda s: s.step_gap_p99_s),
    _Field(
        "surestep:drafter_check_acceptance",
        "Share of drafts accepted in the drafter's check at start-up, 0 to 1.",
        lambda s: s.num_check_accepted_tokens / max(1, s.num_check_draft_tokens),
    ),
)
_COUNTERS = (
    _Field("surestep:prompt_tokens", "Prompt tokens admitted.", lambda s: s.prompt_tokens),
    _Field("surestep:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _Field(
        "surestep:snapshot_queries",
        "Admissions that looked for a snapshot of recurrent state.",
        lambda s: s.num_snapshot_queries,
    ),
    _Field(
        "surestep:snapshot_hits", "Admissions that started from one.", lambda s: s.num_snapshot_hits
    ),
    _Field("surestep:snapshots_taken", "Snapshots taken.", lambda s: s.num_snapshots_taken),
    _Field(
        "surestep:snapshot_evictions",
        "Snapshots given up for newer ones.",
        lambda s: s.num_snapshot_evictions,
    ),
    _Field(
        "surestep:speculation_suspensions",
        "Times that speculation was suspended because acceptance had collapsed.",
        lambda s: s.num_speculation_suspensions,
    ),
    _Field("surestep:preemptions", "Preemptions.", lambda s: s.num_preemptions),
    _Field(
        "surestep:displacements",
        "Preemptions that made room for another tenant.",
        lambda s: s.num_displacements,
    ),
    _Field("surestep:steps", "Steps.", lambda s: s.num_steps),
    _Field("surestep:epochs", "Epochs opened.", lambda s: s.num_epochs),
    _Field(
        "surestep:replayed_requests",
        "Requests admitted again after an epoch was lost.",
        lambda s: s.num_replayed_requests,
    ),
    _Field(
        "surestep:replayed_tokens",
        "Tokens computed again after an epoch was lost, prompts included.",
        lambda s: s.num_replayed_tokens,
    ),
    _Field(
        "surestep:fenced_messages",
        "Results dropped because their epoch was over.",
        lambda s: s.num_fenced_messages,
    ),
    _Field(
        "surestep:drafter_faults",
        "Steps that went on without their drafter.",
        lambda s: s.num_drafter_faults,
    ),
    _Field(
        "surestep:poisoned_requests",
        "Requests given up because they ended the workers.",
        lambda s: s.num_poisoned_requests,
    ),
    _Field(
        "surestep:canaries",
        "Steps only to see whether workers live.",
        lambda s: s.num_canaries,
    ),
    _Field(
        "surestep:step_deadlines_exceeded",
        "Steps given up for hung.",
        lambda s: s.num_step_deadlines_exceeded,
    ),
    _Field("surestep:aborted_requests", "Requests aborted.", lambda s: s.num_aborted_requests),
)


class SchedulerCollector(Collector):
    """The schedulers' numbers as last read."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._readings: Sequence[SchedulerReading] = ()
        self._answers: Sequence[Answer] = ()
        self._engine = EngineMetrics(model_name)

    def update(self, readings: Sequence[SchedulerReading]) -> None:
        """Replace what the next scrape shows. Readings must come in the order they were made in."""
        self._readings = readings
        self._answers = [
            Answer(reading.address, reading.stats, reading.info)
            for reading in readings
            if reading.stats is not None
        ]
        self._engine.update(self._answers)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are fixed and never clash."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Families in a stable order; only the first two know schedulers that do not answer."""
        yield self._gauge(
            "surestep:scheduler_up",
            "Whether the scheduler answers.",
            lambda reading: reading.stats is not None,
        )
        yield self._gauge(
            "surestep:circuit_breaker_state",
            "0 = closed, 1 = half open, 2 = open: no requests for now.",
            lambda reading: reading.breaker,
        )
        if not self._answers:
            return
        yield from self._engine.families(self._answers)
        labelled = [(self._labels(answer.address), answer.stats) for answer in self._answers]
        for field in _GAUGES:
            family = GaugeMetricFamily(field.name, field.text, labels=_LABELS)
            yield _filled(family, field, labelled)
        for field in _COUNTERS:
            counter = CounterMetricFamily(field.name, field.text, labels=_LABELS)
            yield _filled(counter, field, labelled)
        yield _worker_restarts(labelled)
        yield from _fault_durations(labelled)

    def _labels(self, address: str) -> _Labels:
        addresses = [reading.address for reading in self._readings]
        return self._model_name, str(addresses.index(address)), address

    def _gauge(self, name: str, text: str, value: Callable[[SchedulerReading], float]) -> Metric:
        """What is known of a scheduler without its answer."""
        family = GaugeMetricFamily(name, text, labels=("scheduler",))
        for reading in self._readings:
            family.add_metric((reading.address,), float(value(reading)))
        return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, field: _Field, labelled: Sequence[_Labelled]
) -> Metric:
    for labels, stats in labelled:
        family.add_metric(labels, field.value(stats))
    return family


def _worker_restarts(labelled: Sequence[_Labelled]) -> Metric:
    family = CounterMetricFamily(
        "surestep:worker_restarts",
        "Epochs that were lost and their workers replaced, by cause.",
        labels=(*_LABELS, "cause"),
    )
    for labels, stats in labelled:
        for cause, count in sorted(stats.num_incidents.items()):
            family.add_metric((*labels, cause), count)
    return family


def _fault_durations(labelled: Sequence[_Labelled]) -> Iterator[Metric]:
    detection = SummaryMetricFamily(
        "surestep:fault_detection_seconds",
        "From the last sign of life of a worker to the end of its epoch.",
        labels=_LABELS,
    )
    recovery = SummaryMetricFamily(
        "surestep:fault_recovery_seconds",
        "From the end of an epoch to the first step of the next.",
        labels=_LABELS,
    )
    for labels, stats in labelled:
        detection.add_metric(labels, sum(stats.num_incidents.values()), stats.detect_s_sum)
        recovery.add_metric(labels, stats.num_recoveries, stats.recover_s_sum)
    yield detection
    yield recovery
