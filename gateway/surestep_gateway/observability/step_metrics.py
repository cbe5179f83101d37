"""Sizes and durations of steps as Prometheus metrics; one sample or more per scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from surestep_proto.scheduler_pb2 import SchedulerStats, StepStats

from .metric_families import (
    Distribution,
    Histogram,
    Labelled,
    Split,
    histogram_family,
    of_small_numbers,
    split_family,
)

_MOST_DRAFTS = 16  # that a row may have
_RANK_PHASES = ("queue", "prepare", "draft", "forward", "verify", "bubble")

_Values = Iterable[tuple[tuple[str, ...], float]]


def _by_name(counts: Mapping[str, float]) -> _Values:
    return (((name,), count) for name, count in sorted(counts.items()))


def _by_place(counts: Sequence[int]) -> _Values:
    return (((str(place),), count) for place, count in enumerate(counts))


def _by_size(stats: SchedulerStats, field: str) -> _Values:
    return (((size.source, str(size.rows)), getattr(size, field)) for size in stats.drafting)


def drafted_at(steps: StepStats) -> list[int]:
    """Return how many windows had a draft at each position."""
    return list(accumulate(reversed(steps.num_windows_by_drafts[1:])))[::-1]


def _rank_seconds(stats: SchedulerStats) -> _Values:
    for rank, seconds in enumerate(stats.steps.ranks):
        for phase in _RANK_PHASES:
            yield (str(rank), phase), getattr(seconds, f"{phase}_s")


def _block_states(stats: SchedulerStats) -> Mapping[str, float]:
    free = stats.num_blocks_total - stats.num_blocks_used - stats.num_blocks_cached
    return {"used": stats.num_blocks_used, "cached": stats.num_blocks_cached, "free": free}


def _durations(stats: SchedulerStats) -> Distribution:
    steps = stats.steps
    counts = steps.num_steps_within or [0] * (len(steps.bounds_s) + 1)
    return Distribution(steps.bounds_s, counts, steps.step_s)


_GAUGES: tuple[Split[SchedulerStats], ...] = (
    Split(
        "surestep:kv_blocks",
        "KV blocks: used by requests; cached, which is free but with content that may be found "
        "again; or free.",
        ("state",),
        lambda s: _by_name(_block_states(s)),
    ),
    Split(
        "surestep:drafting_value",
        "Tokens per second with drafts as a multiple of those without, by source of the drafts and "
        "the most requests that a step decodes: drafts are made where it is above 1.",
        ("source", "rows"),
        lambda s: _by_size(s, "value"),
    ),
    Split(
        "surestep:drafting_time_factor",
        "Time that drafts add as a multiple of what is computed, found by comparing steps.",
        ("source", "rows"),
        lambda s: _by_size(s, "time_factor"),
    ),
)
_COUNTERS: tuple[Split[SchedulerStats], ...] = (
    Split(
        "surestep:mode_steps",
        "Steps with a row of the mode.",
        ("mode",),
        lambda s: _by_name(s.steps.num_steps_by_mode),
    ),
    Split(
        "surestep:mode_rows",
        "Rows of steps, by mode.",
        ("mode",),
        lambda s: _by_name(s.steps.num_rows_by_mode),
    ),
    Split(
        "surestep:drafted_per_position",
        "Windows with a draft at the position.",
        ("position",),
        lambda s: _by_place(drafted_at(s.steps)),
    ),
    Split(
        "surestep:accepted_per_position",
        "Drafts accepted at the position.",
        ("position",),
        lambda s: _by_place(s.num_accepted_tokens_per_pos),
    ),
    Split(
        "surestep:drafting_trials",
        "Steps with drafts compared with steps without.",
        ("source", "rows"),
        lambda s: _by_size(s, "num_trials"),
    ),
    Split(
        "surestep:ledger_checks",
        "What was compared between scheduler and workers: rows with the scheduler's own books, "
        "digests of ranks with rank 0's. What differs is counted by worker_restarts.",
        ("kind",),
        lambda s: _by_name(
            {"rows": s.steps.num_checked_rows, "digests": s.steps.num_checked_digests}
        ),
    ),
    Split(
        "surestep:scheduler_seconds",
        "What the scheduler spent on steps: planning them and applying their results.",
        ("phase",),
        lambda s: _by_name({"plan": s.steps.plan_s, "apply": s.steps.apply_s}),
    ),
    Split(
        "surestep:rank_seconds",
        "What a rank spent on steps. Queue: plans waited for the step before; bubble: nothing to "
        "do although there was work.",
        ("rank", "phase"),
        _rank_seconds,
    ),
)
_HISTOGRAMS: tuple[Histogram[SchedulerStats], ...] = (
    Histogram("surestep:step_seconds", "Duration of a step.", _durations),
    Histogram(
        "surestep:draft_length",
        "Drafts that a row was given at most, of rows that decode.",
        lambda s: of_small_numbers(s.steps.num_rows_by_k, _MOST_DRAFTS),
    ),
    Histogram(
        "surestep:accepted_length",
        "Drafts accepted of a window with drafts; it emits a token more.",
        lambda s: of_small_numbers(s.steps.num_windows_by_accepted, _MOST_DRAFTS),
    ),
)


def step_families(labelled: Labelled[SchedulerStats]) -> Iterator[Metric]:
    """Yield all families in a stable order."""
    for split in _GAUGES:
        yield split_family(GaugeMetricFamily, split, labelled)
    for split in _COUNTERS:
        yield split_family(CounterMetricFamily, split, labelled)
    for histogram in _HISTOGRAMS:
        yield histogram_family(histogram, labelled)
