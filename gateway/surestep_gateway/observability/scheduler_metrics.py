"""The schedulers' statistics as Prometheus metrics.

Under our names there is one sample per scheduler: `engine` numbers them, `scheduler` names them.
Under vLLM's names there is one sample for all: `vllm_metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from surestep_proto.scheduler_pb2 import SchedulerInfo, SchedulerStats, SchedulerStatus

from surestep_gateway.schedulers.losses import BreakerState

from .metric_families import LABELS, Field, Labelled, Labels, Split, family, split_family
from .rank_metrics import rank_families
from .step_metrics import step_families
from .vllm_metrics import EngineMetrics, StatsReply, adapters_of


class SchedulerReading(NamedTuple):
    """The statistics of one scheduler at one moment."""

    model: str  # as its metrics are labelled
    number: int  # among those of the model, for as long as it is there
    address: str
    breaker: BreakerState
    stats: SchedulerStats | None  # None: no answer
    info: SchedulerInfo | None  # None: it has never served
    status: SchedulerStatus | None  # None: no answer


_GAUGES: tuple[Field[SchedulerStats], ...] = (
    Field("surestep:requests_running", "Requests in slots.", lambda s: s.num_running),
    Field("surestep:requests_waiting", "Requests queued.", lambda s: s.num_waiting),
    Field(
        "surestep:kv_cache_usage",
        "Share of KV blocks in use, 0 to 1.",
        lambda s: s.num_blocks_used / max(1, s.num_blocks_total),
    ),
    Field(
        "surestep:speculation_suspended",
        "1 while drafts are suspended because acceptance has collapsed.",
        lambda s: s.speculation_suspended,
    ),
    Field(
        "surestep:paused",
        "1 while an operator has stopped the engine: it is paused, or asleep.",
        lambda s: s.HasField("pause"),
    ),
    Field(
        "surestep:drafter_broken",
        "1 while nothing is drafted because the drafter that was asked for cannot be used.",
        lambda s: s.drafter_broken,
    ),
    Field(
        "surestep:queued_tokens", "Tokens of the requests that wait.", lambda s: s.num_queued_tokens
    ),
    Field(
        "surestep:last_token_age_seconds",
        "Since a token was emitted, by a canary if no request has one; 0 before the first.",
        lambda s: s.last_token_age_s,
    ),
    Field("surestep:tenants", "Tenants with open requests.", lambda s: s.num_tenants),
    Field(
        "surestep:slots", "Slots: most requests that can run at once.", lambda s: s.num_slots_total
    ),
    Field(
        "surestep:snapshots",
        "Snapshots of recurrent state that there is room for.",
        lambda s: s.num_snapshots_total,
    ),
    Field(
        "surestep:snapshots_held",
        "Snapshots of recurrent state that have content.",
        lambda s: s.num_snapshots_held,
    ),
    Field("surestep:slots_used", "Slots held by requests.", lambda s: s.num_slots_used),
    Field(
        "surestep:step_time_p50_seconds",
        "Median duration of recent steps.",
        lambda s: s.step_time_p50_s,
    ),
    Field(
        "surestep:step_time_p99_seconds",
        "99th percentile of the duration of recent steps.",
        lambda s: s.step_time_p99_s,
    ),
    Field(
        "surestep:step_gap_p50_seconds",
        "Median time between two steps in which workers with work to do waited.",
        lambda s: s.step_gap_p50_s,
    ),
    Field(
        "surestep:step_gap_p99_seconds", "99th percentile of that time.", lambda s: s.step_gap_p99_s
    ),
    Field(
        "surestep:drafter_check_acceptance",
        "Share of drafts accepted in the drafter's check at start-up, 0 to 1.",
        lambda s: s.num_check_accepted_tokens / max(1, s.num_check_draft_tokens),
    ),
)
_COUNTERS: tuple[Field[SchedulerStats], ...] = (
    Field("surestep:prompt_tokens", "Prompt tokens admitted.", lambda s: s.prompt_tokens),
    Field("surestep:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    Field(
        "surestep:snapshot_queries",
        "Admissions that looked for a snapshot of recurrent state.",
        lambda s: s.num_snapshot_queries,
    ),
    Field(
        "surestep:snapshot_hits", "Admissions that started from one.", lambda s: s.num_snapshot_hits
    ),
    Field("surestep:snapshots_taken", "Snapshots taken.", lambda s: s.num_snapshots_taken),
    Field(
        "surestep:snapshot_evictions",
        "Snapshots given up for newer ones.",
        lambda s: s.num_snapshot_evictions,
    ),
    Field(
        "surestep:tier_queries",
        "Tokens that the tiers behind the KV blocks were asked for.",
        lambda s: s.num_tier_queries,
    ),
    Field(
        "surestep:tier_hits",
        "Tokens that requests went on from by blocks of these tiers.",
        lambda s: s.num_tier_hits,
    ),
    Field(
        "surestep:tier_stored_blocks",
        "KV blocks that these tiers stored.",
        lambda s: s.num_tier_stored_blocks,
    ),
    Field(
        "surestep:kv_event_batches",
        "Batches of KV events for routers.",
        lambda s: s.num_kv_event_batches,
    ),
    Field(
        "surestep:kv_event_batches_dropped",
        "Batches of KV events that were not sent, for lack of room to wait for the socket.",
        lambda s: s.num_kv_event_batches_dropped,
    ),
    Field(
        "surestep:speculation_suspensions",
        "Times that speculation was suspended because acceptance had collapsed.",
        lambda s: s.num_speculation_suspensions,
    ),
    Field(
        "surestep:preemptions",
        "Times that a request gave up its slot for lack of room.",
        lambda s: s.num_preemptions,
    ),
    Field(
        "surestep:displacements",
        "Preemptions that made room for another tenant.",
        lambda s: s.num_displacements,
    ),
    Field("surestep:steps", "Steps.", lambda s: s.num_steps),
    Field("surestep:epochs", "Epochs opened.", lambda s: s.num_epochs),
    Field(
        "surestep:replayed_requests",
        "Requests admitted again after an epoch was lost.",
        lambda s: s.num_replayed_requests,
    ),
    Field(
        "surestep:replayed_tokens",
        "Tokens computed again after an epoch was lost, prompts included.",
        lambda s: s.num_replayed_tokens,
    ),
    Field(
        "surestep:fenced_messages",
        "Results dropped because their epoch was over.",
        lambda s: s.num_fenced_messages,
    ),
    Field(
        "surestep:drafter_faults",
        "Steps that went on without their drafter.",
        lambda s: s.num_drafter_faults,
    ),
    Field(
        "surestep:poisoned_requests",
        "Requests given up because they ended the workers.",
        lambda s: s.num_poisoned_requests,
    ),
    Field(
        "surestep:canaries",
        "Steps only to see whether workers live.",
        lambda s: s.num_canaries,
    ),
    Field(
        "surestep:step_deadlines_exceeded",
        "Steps given up for hung.",
        lambda s: s.num_step_deadlines_exceeded,
    ),
    Field("surestep:aborted_requests", "Requests aborted.", lambda s: s.num_aborted_requests),
)
_RESTARTS: Split[SchedulerStats] = Split(
    "surestep:worker_restarts",
    "Epochs that were lost and their workers replaced, by cause.",
    ("cause",),
    lambda s: (((cause,), count) for cause, count in sorted(s.num_incidents.items())),
)


def _by_adapter(stats: SchedulerStats) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the requests of each adapter; two have one name while one of them leaves."""
    for state in ("running", "waiting"):
        total = Counter[str]()
        for load in stats.adapters:
            total[load.name] += getattr(load, f"num_{state}")
        yield from (((name, state), count) for name, count in sorted(total.items()))


_ADAPTERS: Split[SchedulerStats] = Split(
    "surestep:adapter_requests",
    "Requests in slots and queued, by loaded adapter.",
    ("adapter", "state"),
    _by_adapter,
)


class SchedulerCollector(Collector):
    """Collects the latest statistics of all schedulers."""

    def __init__(self, model_names: Sequence[str]) -> None:
        self._readings: Sequence[SchedulerReading] = ()
        self._answers: Sequence[StatsReply] = ()
        self._engines = {name: EngineMetrics(name) for name in model_names}

    def update(self, readings: Sequence[SchedulerReading]) -> None:
        """Replace the content of the next scrape. Readings must come in the order they were made
        in.
        """
        self._readings = readings
        self._answers = [
            StatsReply(reading.model, reading.address, reading.stats, reading.info)
            for reading in readings
            if reading.stats is not None
        ]
        for model, answers in self._by_model().items():
            self._engines[model].update(answers)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are fixed and never clash."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield families in a stable order; only the first two include unreachable schedulers."""
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
        yield from self._engine_families()
        labelled = [(self._labels(answer.address), answer.stats) for answer in self._answers]
        for gauge in _GAUGES:
            yield family(GaugeMetricFamily, gauge, labelled)
        for counter in _COUNTERS:
            yield family(CounterMetricFamily, counter, labelled)
        yield split_family(CounterMetricFamily, _RESTARTS, labelled)
        yield split_family(GaugeMetricFamily, _ADAPTERS, labelled)
        yield from _fault_durations(labelled)
        yield from step_families(labelled)
        yield from rank_families(
            [
                (self._labels(reading.address), reading.status)
                for reading in self._readings
                if reading.status is not None
            ]
        )

    def _by_model(self) -> dict[str, list[StatsReply]]:
        found: dict[str, list[StatsReply]] = {}
        for answer in self._answers:
            found.setdefault(answer.model, []).append(answer)
        return found

    def _engine_families(self) -> Iterator[Metric]:
        """Yield vLLM's families, each with the samples of all models."""
        each = [self._engines[name].families(said) for name, said in self._by_model().items()]
        for first, *others in zip(*each, strict=True):
            for other in others:
                first.samples += other.samples
            yield first
        yield adapters_of(self._answers)

    def _labels(self, address: str) -> Labels:
        one = next(one for one in self._readings if one.address == address)
        return one.model, str(one.number), address

    def _gauge(self, name: str, text: str, value: Callable[[SchedulerReading], float]) -> Metric:
        """Return a gauge of what is known without the scheduler's reply."""
        metric = GaugeMetricFamily(name, text, labels=("scheduler",))
        for reading in self._readings:
            metric.add_metric((reading.address,), float(value(reading)))
        return metric


def _fault_durations(labelled: Labelled[SchedulerStats]) -> Iterator[Metric]:
    detection = SummaryMetricFamily(
        "surestep:fault_detection_seconds",
        "From the last sign of life of a worker to the end of its epoch.",
        labels=LABELS,
    )
    recovery = SummaryMetricFamily(
        "surestep:fault_recovery_seconds",
        "From the end of an epoch to the first step of the next.",
        labels=LABELS,
    )
    for labels, stats in labelled:
        detection.add_metric(labels, sum(stats.num_incidents.values()), stats.detect_s_sum)
        recovery.add_metric(labels, stats.num_recoveries, stats.recover_s_sum)
    yield detection
    yield recovery
