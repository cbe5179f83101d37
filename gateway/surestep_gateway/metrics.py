"""Prometheus metrics, under the names vLLM's dashboards use.

Latencies are measured here, where the client's wait is seen. Counters of tokens, blocks and drafts
belong to the scheduler and are read from it at every scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from surestep_proto.generate_pb2 import SchedulerInfo, SchedulerStats

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_LABELS = ("model_name", "engine")
_ENGINE = "0"


class Metrics:
    """All metrics of one gateway."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.scheduler = SchedulerCollector(model_name)
        self.registry.register(self.scheduler)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"vllm:{name}"
            metric = Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)
            return metric.labels(model_name, _ENGINE)

        self.first_token = histogram(
            "time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN_S
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two deliveries of tokens.", _TOKEN_S
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            _TOKEN_S,
        )
        self.request = histogram(
            "e2e_request_latency_seconds", "Request received to last token.", _REQUEST_S
        )
        self.queue = histogram("request_queue_time_seconds", "Waiting for a slot.", _REQUEST_S)
        self.prefill = histogram(
            "request_prefill_time_seconds", "End of waiting to first token.", _REQUEST_S
        )
        self.decode = histogram(
            "request_decode_time_seconds", "First token to last token.", _REQUEST_S
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated.", _TOKENS
        )
        self._success = Counter(
            "vllm:request_success",
            "Sequences ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._model_name = model_name
        self.responses = Counter(
            "surestep:http_responses",
            "HTTP responses by status.",
            ("status",),
            registry=self.registry,
        )
        self.resumes = Counter(
            "surestep:gateway_resumes",
            "Sequences resubmitted after their scheduler was lost.",
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "surestep:gateway_open_requests", "Generation requests open.", registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, _ENGINE, reason)

    def count_end(self, reason: str) -> None:
        """One sequence ended for `reason`: stop, length, abort or error."""
        self._success.labels(self._model_name, _ENGINE, reason).inc()

    def render(self, stats: SchedulerStats | None, info: SchedulerInfo | None) -> bytes:
        """The exposition text. `stats` is None when the scheduler does not answer."""
        self.scheduler.update(stats, info)
        return generate_latest(self.registry)


class SequenceTimer:
    """Latencies of one sequence. `arrived` is on the clock of `time.perf_counter`."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._queue_s = 0.0
        self._first = 0.0
        self._last = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token, if there was one."""
        return self._first - self._arrived if self._first else None

    def started(self, queue_s: float) -> None:
        """The scheduler started the sequence after it had waited `queue_s` seconds."""
        self._queue_s = queue_s
        self._metrics.queue.observe(queue_s)

    def tokens(self) -> None:
        """Tokens came."""
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token.observe(now - self._last)
        else:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
        self._last = now

    def resumed(self, times: int) -> None:
        """The sequence outlived its scheduler so many times."""
        self._metrics.resumes.inc(times)

    def finished(self, reason: str, prompt_tokens: int, tokens: int) -> None:
        """The sequence ended with so many tokens."""
        metrics = self._metrics
        metrics.count_end(reason)
        if reason in ("abort", "error") or not self._first:
            return
        metrics.request.observe(self._last - self._arrived)
        metrics.prefill.observe(max(0.0, self._first - self._arrived - self._queue_s))
        metrics.decode.observe(self._last - self._first)
        if tokens > 1:
            metrics.per_token.observe((self._last - self._first) / (tokens - 1))
        metrics.prompt_tokens.observe(prompt_tokens)
        metrics.generation_tokens.observe(tokens)


class _Reading(NamedTuple):
    name: str
    text: str
    value: Callable[[SchedulerStats], float]


_GAUGES = (
    _Reading("vllm:num_requests_running", "Requests in slots.", lambda s: s.num_running),
    _Reading("vllm:num_requests_waiting", "Requests queued.", lambda s: s.num_waiting),
    _Reading(
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda s: s.num_blocks_used / max(1, s.num_blocks_total),
    ),
    _Reading(
        "surestep:speculation_suspended",
        "1 while drafts are suspended because acceptance has collapsed.",
        lambda s: s.speculation_suspended,
    ),
    _Reading("surestep:slots_used", "Slots held by requests.", lambda s: s.num_slots_used),
    _Reading("surestep:step_time_p50_seconds", "Median step.", lambda s: s.step_time_p50_s),
    _Reading("surestep:step_time_p99_seconds", "Slow step.", lambda s: s.step_time_p99_s),
    _Reading(
        "surestep:step_gap_p50_seconds",
        "Median time between two steps in which workers with work to do waited.",
        lambda s: s.step_gap_p50_s,
    ),
    _Reading("surestep:step_gap_p99_seconds", "Long one.", lambda s: s.step_gap_p99_s),
    _Reading(
        "surestep:drafter_check_acceptance",
        "Share of drafts accepted in the drafter's check at start-up, 0 to 1.",
        lambda s: s.num_check_accepted_tokens / max(1, s.num_check_draft_tokens),
    ),
)
_COUNTERS = (
    _Reading("vllm:prompt_tokens", "Prompt tokens admitted.", lambda s: s.prompt_tokens),
    _Reading("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    _Reading("vllm:prefix_cache_queries", "Tokens looked up.", lambda s: s.prefix_cache_queries),
    _Reading("vllm:prefix_cache_hits", "Tokens found.", lambda s: s.prefix_cache_hits),
    _Reading(
        "surestep:snapshot_queries",
        "Admissions that looked for a snapshot of recurrent state.",
        lambda s: s.num_snapshot_queries,
    ),
    _Reading(
        "surestep:snapshot_hits", "Admissions that started from one.", lambda s: s.num_snapshot_hits
    ),
    _Reading("surestep:snapshots_taken", "Snapshots taken.", lambda s: s.num_snapshots_taken),
    _Reading(
        "surestep:snapshot_evictions",
        "Snapshots given up for newer ones.",
        lambda s: s.num_snapshot_evictions,
    ),
    _Reading(
        "surestep:speculation_suspensions",
        "Times that speculation was suspended because acceptance had collapsed.",
        lambda s: s.num_speculation_suspensions,
    ),
    _Reading("vllm:num_preemptions", "Preemptions.", lambda s: s.num_preemptions),
    _Reading("vllm:spec_decode_num_drafts", "Windows with drafts.", lambda s: s.num_drafts),
    _Reading("vllm:spec_decode_num_draft_tokens", "Drafts verified.", lambda s: s.num_draft_tokens),
    _Reading(
        "vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: s.num_accepted_tokens
    ),
    _Reading("surestep:steps", "Steps.", lambda s: s.num_steps),
    _Reading("surestep:epochs", "Epochs opened.", lambda s: s.num_epochs),
    _Reading("surestep:replays", "Requests replayed.", lambda s: s.num_replayed_requests),
    _Reading(
        "surestep:step_deadlines_exceeded",
        "Steps given up for hung.",
        lambda s: s.num_step_deadlines_exceeded,
    ),
    _Reading("surestep:aborted_requests", "Requests aborted.", lambda s: s.num_aborted_requests),
)


class SchedulerCollector(Collector):
    """The scheduler's numbers as last read."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, _ENGINE)
        self._stats: SchedulerStats | None = None
        self._info: SchedulerInfo | None = None

    def update(self, stats: SchedulerStats | None, info: SchedulerInfo | None) -> None:
        """Replace what the next scrape shows."""
        self._stats, self._info = stats, info

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: names are fixed and never clash."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Families in a stable order; without an answer only `surestep:scheduler_up`."""
        stats = self._stats
        up = GaugeMetricFamily("surestep:scheduler_up", "Whether the scheduler answers.")
        up.add_metric((), float(stats is not None))
        yield up
        if stats is None:
            return
        for reading in _GAUGES:
            gauge = GaugeMetricFamily(reading.name, reading.text, labels=_LABELS)
            gauge.add_metric(self._labels, reading.value(stats))
            yield gauge
        for reading in _COUNTERS:
            counter = CounterMetricFamily(reading.name, reading.text, labels=_LABELS)
            counter.add_metric(self._labels, reading.value(stats))
            yield counter
        yield self._accepted_per_position(stats)
        yield self._rejections(stats)
        if self._info is not None:
            yield self._cache_config(self._info)

    def _accepted_per_position(self, stats: SchedulerStats) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position in the window.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            family.add_metric((*self._labels, str(position)), count)
        return family

    def _rejections(self, stats: SchedulerStats) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused.", labels=(*_LABELS, "reason")
        )
        family.add_metric((*self._labels, "queue_full"), stats.num_rejected_requests)
        return family

    def _cache_config(self, info: SchedulerInfo) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Facts of the KV cache.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
        )
        sizes = (str(info.block_size), str(info.num_blocks), info.dtype)
        family.add_metric((*self._labels, *sizes), 1.0)
        return family
