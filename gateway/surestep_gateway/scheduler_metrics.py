"""The schedulers' numbers as Prometheus metrics.

One sample per scheduler: `engine` numbers them as vLLM numbers its engines, `scheduler` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from surestep_proto.generate_pb2 import SchedulerInfo, SchedulerStats

from .breaker import BreakerState

_LABELS = ("model_name", "engine", "scheduler")


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
    _Field("vllm:num_requests_running", "Requests in slots.", lambda s: s.num_running),
    _Field("vllm:num_requests_waiting", "Requests queued.", lambda s: s.num_waiting),
    _Field(
        "vllm:kv_cache_usage_perc",
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
    _Field("vllm:prompt_tokens", "Prompt tokens admitted.", lambda s: s.prompt_tokens),
    _Field("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _Field("vllm:prefix_cache_queries", "Tokens looked up.", lambda s: s.prefix_cache_queries),
    _Field("vllm:prefix_cache_hits", "Tokens found.", lambda s: s.prefix_cache_hits),
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
    _Field("vllm:num_preemptions", "Preemptions.", lambda s: s.num_preemptions),
    _Field(
        "surestep:displacements",
        "Preemptions that made room for another tenant.",
        lambda s: s.num_displacements,
    ),
    _Field("vllm:spec_decode_num_drafts", "Windows with drafts.", lambda s: s.num_drafts),
    _Field("vllm:spec_decode_num_draft_tokens", "Drafts verified.", lambda s: s.num_draft_tokens),
    _Field(
        "vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: s.num_accepted_tokens
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


class _Labelled(NamedTuple):
    """A counter with one more label, and its count for each value of it."""

    name: str
    text: str
    label: str
    counts: Callable[[SchedulerStats], Iterable[tuple[str, float]]]


_LABELLED = (
    _Labelled(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by position in the window.",
        "position",
        lambda s: ((str(i), count) for i, count in enumerate(s.num_accepted_tokens_per_pos)),
    ),
    _Labelled(
        "vllm:admission_rejections",
        "Requests refused.",
        "reason",
        lambda s: (("queue_full", s.num_rejected_requests),),
    ),
    _Labelled(
        "surestep:worker_restarts",
        "Epochs that were lost and their workers replaced, by cause.",
        "cause",
        lambda s: sorted(s.num_incidents.items()),
    ),
)


class _Answer(NamedTuple):
    """A scheduler that has answered, under its labels."""

    labels: tuple[str, str, str]
    stats: SchedulerStats
    info: SchedulerInfo | None


class SchedulerCollector(Collector):
    """The schedulers' numbers as last read."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._readings: Sequence[SchedulerReading] = ()

    def update(self, readings: Sequence[SchedulerReading]) -> None:
        """Replace what the next scrape shows."""
        self._readings = readings

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
        answers = [
            _Answer((self._model_name, str(engine), reading.address), reading.stats, reading.info)
            for engine, reading in enumerate(self._readings)
            if reading.stats is not None
        ]
        if not answers:
            return
        for field in _GAUGES:
            yield _filled(GaugeMetricFamily(field.name, field.text, labels=_LABELS), field, answers)
        for field in _COUNTERS:
            family = CounterMetricFamily(field.name, field.text, labels=_LABELS)
            yield _filled(family, field, answers)
        for labelled in _LABELLED:
            yield _by_label(labelled, answers)
        yield _cache_config(answers)
        yield from _fault_durations(answers)

    def _gauge(self, name: str, text: str, value: Callable[[SchedulerReading], float]) -> Metric:
        """What is known of a scheduler without its answer."""
        family = GaugeMetricFamily(name, text, labels=("scheduler",))
        for reading in self._readings:
            family.add_metric((reading.address,), float(value(reading)))
        return family


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, field: _Field, answers: Sequence[_Answer]
) -> Metric:
    for answer in answers:
        family.add_metric(answer.labels, field.value(answer.stats))
    return family


def _by_label(labelled: _Labelled, answers: Sequence[_Answer]) -> Metric:
    family = CounterMetricFamily(labelled.name, labelled.text, labels=(*_LABELS, labelled.label))
    for labels, stats, _ in answers:
        for value, count in labelled.counts(stats):
            family.add_metric((*labels, value), count)
    return family


def _cache_config(answers: Sequence[_Answer]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Facts of the KV cache.",
        labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
    )
    for labels, _, info in answers:
        if info is not None:
            sizes = (str(info.block_size), str(info.num_blocks), info.dtype)
            family.add_metric((*labels, *sizes), 1.0)
    return family


def _fault_durations(answers: Sequence[_Answer]) -> Iterator[Metric]:
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
    for labels, stats, _ in answers:
        detection.add_metric(labels, sum(stats.num_incidents.values()), stats.detect_s_sum)
        recovery.add_metric(labels, stats.num_recoveries, stats.recover_s_sum)
    yield detection
    yield recovery
