"""The schedulers' statistics under vLLM's names, as if those of a model were one engine.

vLLM's dashboards expect one series of each name, so the statistics are summed over schedulers.
Counters never fall: a scheduler that restarts or does not respond continues from its last value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from surestep_proto.scheduler_pb2 import SchedulerInfo, SchedulerStats

from .metric_families import Distribution, within

LABELS = ("model_name", "engine")
ENGINE = "0"
_MOST_SCHEDULERS = 1024  # whose counters are known, those that left included


class StatsReply(NamedTuple):
    """The current statistics of one scheduler."""

    model: str
    address: str
    stats: SchedulerStats
    info: SchedulerInfo | None


class _Gauge(NamedTuple):
    name: str
    text: str
    value: Callable[[Sequence[SchedulerStats]], float]


class _Counter(NamedTuple):
    """With `label`, one count per value of that label; else a single one, for the value ""."""

    name: str
    text: str
    counts: Callable[[SchedulerStats], Iterable[tuple[str, float]]]
    label: str = ""


def _one(value: Callable[[SchedulerStats], float]) -> Callable[..., Iterable[tuple[str, float]]]:
    return lambda stats: (("", value(stats)),)


_GAUGES = (
    _Gauge(
        "vllm:num_requests_running",
        "Requests in slots.",
        lambda every: sum(s.num_running for s in every),
    ),
    _Gauge(
        "vllm:num_requests_waiting",
        "Requests queued.",
        lambda every: sum(s.num_waiting for s in every),
    ),
    _Gauge(
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda every: (
            sum(s.num_blocks_used for s in every) / max(1, sum(s.num_blocks_total for s in every))
        ),
    ),
)
_COUNTERS = (
    _Counter("vllm:prompt_tokens", "Prompt tokens admitted.", _one(lambda s: s.prompt_tokens)),
    _Counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens admitted, by where their state came from.",
        lambda s: (
            ("local_compute", s.prompt_tokens - s.num_prompt_tokens_cached),
            ("local_cache_hit", s.num_prompt_tokens_cached - s.num_prompt_tokens_loaded),
            ("external_kv_transfer", s.num_prompt_tokens_loaded),
        ),
        "source",
    ),
    _Counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens found in the prefix cache.",
        _one(lambda s: s.num_prompt_tokens_cached),
    ),
    _Counter(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found in the prefix cache, by the tier that had them.",
        lambda s: (
            ("device", s.num_prompt_tokens_cached - s.num_prompt_tokens_loaded),
            ("external", s.num_prompt_tokens_loaded),
        ),
        "source",
    ),
    _Counter("vllm:generation_tokens", "Tokens generated.", _one(lambda s: s.generation_tokens)),
    _Counter(
        "vllm:prefix_cache_queries", "Tokens looked up.", _one(lambda s: s.prefix_cache_queries)
    ),
    _Counter("vllm:prefix_cache_hits", "Tokens found.", _one(lambda s: s.prefix_cache_hits)),
    _Counter(
        "vllm:external_prefix_cache_queries",
        "Tokens asked of the tiers behind the KV blocks.",
        _one(lambda s: s.num_tier_queries),
    ),
    _Counter(
        "vllm:external_prefix_cache_hits",
        "Tokens loaded from them.",
        _one(lambda s: s.num_tier_hits),
    ),
    _Counter("vllm:num_preemptions", "Preemptions.", _one(lambda s: s.num_preemptions)),
    _Counter("vllm:spec_decode_num_drafts", "Windows with drafts.", _one(lambda s: s.num_drafts)),
    _Counter(
        "vllm:spec_decode_num_draft_tokens",
        "Drafts verified.",
        _one(lambda s: s.num_draft_tokens),
    ),
    _Counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts accepted.",
        _one(lambda s: s.num_accepted_tokens),
    ),
    _Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by position in the window.",
        lambda s: ((str(i), count) for i, count in enumerate(s.num_accepted_tokens_per_pos)),
        "position",
    ),
    _Counter(
        "vllm:admission_rejections",
        "Requests refused.",
        lambda s: (("queue_full", s.num_rejected_requests),),
        "reason",
    ),
)
_STEP_TOKENS = _Counter(
    "vllm:iteration_tokens_total",
    "Tokens that a step computed and kept.",
    lambda s: ((str(bound), count) for bound, count in s.num_steps_by_tokens.items()),
)
_STEP_TOKENS_SUM = _Counter("step tokens", "", _one(lambda s: s.num_step_tokens))


class _Totals:
    """Counters of all schedulers together."""

    def __init__(self) -> None:
        # By scheduler, then by name and label. Those of one that left: it may come back.
        self._last: dict[str, dict[tuple[str, str], float]] = {}
        self._totals: dict[str, dict[str, float]] = {}  # by name and label

    def add(self, address: str, counter: _Counter, stats: SchedulerStats) -> None:
        """Record a scheduler's counter; a smaller value than before means that it was restarted."""
        totals = self._totals.setdefault(counter.name, {})
        known = self._last[address] = self._last.pop(address, {})  # the latest is at the end
        if len(self._last) > _MOST_SCHEDULERS:
            del self._last[next(iter(self._last))]
        for label, value in counter.counts(stats):
            key = (counter.name, label)
            last = known.get(key, 0.0)
            totals[label] = totals.get(label, 0.0) + (value - last if value >= last else value)
            known[key] = value

    def of(self, counter: _Counter) -> dict[str, float]:
        """Return the total by label value."""
        return self._totals.get(counter.name, {})


class EngineMetrics:
    """The metrics that vLLM would report of its engine."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, ENGINE)
        self._totals = _Totals()

    def update(self, answers: Sequence[StatsReply]) -> None:
        """Record the replies, in the order in which they were given."""
        for _, address, stats, _ in answers:
            for counter in (*_COUNTERS, _STEP_TOKENS, _STEP_TOKENS_SUM):
                self._totals.add(address, counter, stats)

    def families(self, answers: Sequence[StatsReply]) -> Iterator[Metric]:
        """Yield all families in a stable order. There must be at least one reply."""
        stats = [answer.stats for answer in answers]
        for gauge in _GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.text, labels=LABELS)
            family.add_metric(self._labels, gauge.value(stats))
            yield family
        yield self._waiting(stats)
        for counter in _COUNTERS:
            yield self._counter(counter)
        yield self._step_tokens()
        yield self._cache_config(answers)
        yield self._sleep_state(stats)

    def _waiting(self, stats: Sequence[SchedulerStats]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests queued, by what they wait for: here always for room.",
            labels=(*LABELS, "reason"),
        )
        family.add_metric((*self._labels, "capacity"), sum(one.num_waiting for one in stats))
        family.add_metric((*self._labels, "deferred"), 0)
        return family

    def _counter(self, counter: _Counter) -> Metric:
        names = (*LABELS, counter.label) if counter.label else LABELS
        family = CounterMetricFamily(counter.name, counter.text, labels=names)
        for label, value in self._totals.of(counter).items():
            family.add_metric((*self._labels, label) if counter.label else self._labels, value)
        return family

    def _step_tokens(self) -> Metric:
        counts = {int(bound): count for bound, count in self._totals.of(_STEP_TOKENS).items()}
        beyond = counts.pop(0, 0.0)
        bounds = sorted(counts)
        total = self._totals.of(_STEP_TOKENS_SUM)[""]
        content = Distribution(bounds, [*(counts[bound] for bound in bounds), beyond], total)
        family = HistogramMetricFamily(_STEP_TOKENS.name, _STEP_TOKENS.text, labels=LABELS)
        family.add_metric(self._labels, within(content), total)
        return family

    def _cache_config(self, answers: Sequence[StatsReply]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Facts of the KV cache.",
            labels=(*LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
        )
        infos = [answer.info for answer in answers if answer.info is not None]
        if infos:
            num_blocks = sum(info.num_blocks for info in infos)
            sizes = (str(infos[0].block_size), str(num_blocks), infos[0].dtype)
            family.add_metric((*self._labels, *sizes), 1.0)
        return family

    def _sleep_state(self, stats: Sequence[SchedulerStats]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Schedulers that are awake, asleep with their weights held, and without any.",
            labels=(*LABELS, "sleep_state"),
        )
        levels = [one.pause.level for one in stats]  # 0: no pause, or one without sleep
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            family.add_metric((*self._labels, state), levels.count(level))
        return family


def adapters_of(answers: Sequence[StatsReply]) -> Metric:
    """Return the LoRA metric that endpoint pickers read: adapters with requests, as of a time."""
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(
        "vllm:lora_requests_info", "LoRA adapters with requests, as of a time.", labels=names
    )
    loads = [load for answer in answers for load in answer.stats.adapters]
    running = ",".join(sorted({load.name for load in loads if load.num_running}))
    waiting = ",".join(sorted({load.name for load in loads if load.num_waiting}))
    most = max((one.info.max_loras for one in answers if one.info is not None), default=0)
    family.add_metric((str(most), running, waiting), time.time() if most else 0.0)
    return family
