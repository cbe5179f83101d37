"""Latencies and errors of clients, measured here: histograms, and the last minutes.

The history has one sample per second.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from surestep_gateway.observability.answer_metrics import AnswerMetrics, AnswerTotals
from surestep_gateway.observability.metric_families import Distribution, within

_EACH_S = 1.0
_KEPT = 181  # samples: three minutes between the first and the last
_MINUTE_S = 60.0
_TYPICAL, _SLOW = 0.5, 0.95


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


class LatencyView(BaseModel):
    """Latency of the last minute, and the slow ones of each second of the history."""

    p50_s: float | None  # None: nothing was measured, as in the others
    p95_s: float | None
    history_p95_s: list[float | None]


class ClientsView(BaseModel):
    """Answers and latencies. Lists are parallel columns, oldest first, one element per second."""

    age_s: list[float]  # of the second's end
    first_token: LatencyView
    inter_token: LatencyView
    queue: LatencyView
    history_failed: list[int]
    history_refused: list[int]
    answers: int  # of the last minute, as what follows; refused and wrong requests aside
    client_gone: int  # of them
    failed: dict[str, int]  # of them, by code: errors of the server
    failed_in_streams: int  # of `failed`, those after a status of 200
    refused: int  # 429


class _Sample(NamedTuple):
    """Counters at one moment; latencies by bucket."""

    at: float
    first_token: list[int]
    inter_token: list[int]
    queue: list[int]
    ends: AnswerTotals


class ClientHistory:
    """Remembers how answers ended and what their latencies were. Times are on one clock."""

    def __init__(
        self,
        answers: AnswerMetrics,
        first_token: TokenHistogram,
        inter_token: TokenHistogram,
        queue: TokenHistogram,
    ) -> None:
        self._answers = answers
        self._first_token, self._inter_token, self._queue = first_token, inter_token, queue
        self._samples: deque[_Sample] = deque(maxlen=_KEPT)

    async def watch(self) -> None:
        """Take samples, until cancelled."""
        while True:
            self._samples.append(self._sample(time.monotonic()))
            await asyncio.sleep(_EACH_S)

    def _sample(self, now: float) -> _Sample:
        return _Sample(
            now,
            self._first_token.counts(),
            self._inter_token.counts(),
            self._queue.counts(),
            self._answers.totals(),
        )

    def view(self, now: float) -> ClientsView:
        """Return the history, and the last minute up to this moment."""
        newest = self._sample(now)
        samples = [*self._samples, newest]
        minute_ago = next(one for one in samples if now - one.at <= _MINUTE_S)
        ends = newest.ends.since(minute_ago.ends)
        pairs = list(pairwise(samples))
        each = [after.ends.since(before.ends) for before, after in pairs]
        failed = sum(ends.failed.values())
        return ClientsView(
            age_s=[round(now - after.at, 2) for _, after in pairs],
            first_token=self._latency(
                self._first_token, [one.first_token for one in samples], minute_ago.first_token
            ),
            inter_token=self._latency(
                self._inter_token, [one.inter_token for one in samples], minute_ago.inter_token
            ),
            queue=self._latency(self._queue, [one.queue for one in samples], minute_ago.queue),
            history_failed=[sum(one.failed.values()) for one in each],
            history_refused=[one.refused for one in each],
            answers=ends.complete + ends.client_gone + failed,
            client_gone=ends.client_gone,
            failed=dict(ends.failed),
            failed_in_streams=ends.in_streams,
            refused=ends.refused,
        )

    def _latency(
        self, histogram: TokenHistogram, counts: Sequence[list[int]], minute_ago: list[int]
    ) -> LatencyView:
        minute = _added(minute_ago, counts[-1])
        return LatencyView(
            p50_s=histogram.quantile(_TYPICAL, minute),
            p95_s=histogram.quantile(_SLOW, minute),
            history_p95_s=[
                histogram.quantile(_SLOW, _added(before, after))
                for before, after in pairwise(counts)
            ],
        )


def _added(before: list[int], after: list[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]
