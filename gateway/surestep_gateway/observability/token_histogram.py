"""A histogram that may be observed with every token, and read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .metric_families import Distribution, within


class TokenHistogram(Collector):
    """Counts on one thread: the library's takes a lock twice for each value, and ten times as
    long.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        """`buckets` are upper bounds, ascending, without infinity."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> list[int]:
        """Return how many values each bucket has; the last one is beyond all bounds."""
        return list(self._counts)

    def quantile(self, share: float, counts: Sequence[int]) -> float | None:
        """Return where a share of the counted values ends, as Prometheus estimates it: values
        spread evenly within a bucket, none beyond the last bound. None where nothing is counted.
        """
        wanted, below, lower = share * sum(counts), 0, 0.0
        for bound, count in zip(self._bounds, counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower if any(counts) else None

    def collect(self) -> Iterator[Metric]:
        """Yield the counts up to each bound and the sum."""
        content = Distribution(self._bounds, self._counts, self._sum)
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), within(content), content.total)
        yield family
