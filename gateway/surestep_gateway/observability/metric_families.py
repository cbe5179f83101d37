"""Families of metrics with one sample or more for each scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

T = TypeVar("T")

LABELS = ("model_name", "engine", "scheduler")
Labels = tuple[str, str, str]  # their values
Labelled = Sequence[tuple[Labels, T]]  # one value per scheduler
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


class Field(NamedTuple, Generic[T]):
    """Number of the schedulers' statistics."""

    name: str
    text: str
    value: Callable[[T], float]


class Split(NamedTuple, Generic[T]):
    """Numbers of one kind that further labels distinguish: label names, and values with a
    number.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    values: Callable[[T], Iterable[tuple[tuple[str, ...], float]]]


class Distribution(NamedTuple):
    """The content of a histogram."""

    bounds: Sequence[float]
    counts: Sequence[float]  # by the least bound; one more: beyond all
    total: float  # of what was observed


class Histogram(NamedTuple, Generic[T]):
    """Distribution of the schedulers' statistics."""

    name: str
    text: str
    value: Callable[[T], Distribution]


def family(kind: Kind, field: Field[T], labelled: Labelled[T]) -> Metric:
    """Return a family with one sample per scheduler."""
    metric = kind(field.name, field.text, labels=LABELS)
    for labels, said in labelled:
        metric.add_metric(labels, field.value(said))
    return metric


def split_family(kind: Kind, split: Split[T], labelled: Labelled[T]) -> Metric:
    """Return a family with one sample per scheduler and value."""
    metric = kind(split.name, split.text, labels=(*LABELS, *split.labels))
    for labels, said in labelled:
        for values, number in split.values(said):
            metric.add_metric((*labels, *values), number)
    return metric


def histogram_family(histogram: Histogram[T], labelled: Labelled[T]) -> Metric:
    """Return a family with one histogram per scheduler."""
    metric = HistogramMetricFamily(histogram.name, histogram.text, labels=LABELS)
    for labels, said in labelled:
        content = histogram.value(said)
        metric.add_metric(labels, within(content), content.total)
    return metric


def within(content: Distribution) -> list[tuple[str, float]]:
    """Return how many values are within each bound, under the names that samples have."""
    names = [*(str(float(bound)) for bound in content.bounds), "+Inf"]
    return list(zip(names, accumulate(content.counts), strict=True))


def of_small_numbers(counts: Sequence[int], largest: int) -> Distribution:
    """Return the distribution of counts by index; the bounds are 0 to `largest`."""
    within = [*counts[: largest + 1], *[0] * (largest + 1 - len(counts))]
    total = sum(number * count for number, count in enumerate(counts))
    return Distribution(range(largest + 1), [*within, sum(counts[largest + 1 :])], total)
