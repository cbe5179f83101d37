"""Answers as clients see them: how they end, how long they take, and both in the last minutes.

An answer, a stream included, ends complete, with an error, or without its client. An error inside a
stream has status 200 for HTTP; here it has the status, type and code that the table of errors gives
it. The history has one sample per second.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from surestep_common.errors import ERROR_TABLE, Cancelled, ErrorKind, QueueFull, kind_of
from surestep_common.tracing import SERVER_FAULT

from surestep_gateway.observability.metric_families import Distribution, within

_EACH_S = 1.0  # between samples
_KEPT = 181  # samples: three minutes between the first and the last
_MINUTE_S = 60.0
_TYPICAL, _SLOW = 0.5, 0.95
_LABELS = ("path", "streamed", "end", "type", "code", "status")
_COMPLETE, _GONE = "complete", "client_gone"
_REFUSED = kind_of(QueueFull(""))
_FAULTS = [kind for kind in ERROR_TABLE if kind.http_status >= SERVER_FAULT]


class Labels(NamedTuple):
    """The labels of one way to end."""

    path: str
    streamed: str  # "true" where the answer had begun as events
    end: str  # complete, client_gone or error
    type: str = ""
    code: str = ""
    status: str = str(HTTPStatus.OK.value)

    @classmethod
    def of_error(cls, path: str, kind: ErrorKind, *, streamed: bool) -> Labels:
        """Return the labels of an answer that ended in an error."""
        known = (kind.openai_type, kind.openai_code, str(kind.http_status))
        end = _GONE if kind.error is Cancelled else "error"
        return cls(path, str(streamed).lower(), end, *known)


class Ending:
    """The end of one answer; of several errors the first one counts."""

    def __init__(self) -> None:
        self.begun = False  # its status was sent
        self.streamed = False
        self.complete = False
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Note the error that the client is told."""
        self.error = self.error or error

    def labels(self, path: str) -> Labels:
        """Return the labels of an answer to a request for `path`."""
        if self.error is None and self.complete:
            return Labels(path, str(self.streamed).lower(), _COMPLETE)
        kind = kind_of(self.error or Cancelled("the client went away"))
        return Labels.of_error(path, kind, streamed=self.streamed)


class AnswerTotals(NamedTuple):
    """Answers since the start of the gateway."""

    failed: Counter[str]  # by code; errors of the server alone
    complete: int = 0
    client_gone: int = 0
    in_streams: int = 0  # of `failed`, those after a status of 200
    refused: int = 0  # 429
    wrong: int = 0  # other errors of the client

    def since(self, before: AnswerTotals) -> AnswerTotals:
        """Return what was added since `before`."""
        return AnswerTotals(
            self.failed - before.failed,
            self.complete - before.complete,
            self.client_gone - before.client_gone,
            self.in_streams - before.in_streams,
            self.refused - before.refused,
            self.wrong - before.wrong,
        )


class AnswerMetrics:
    """Counts the ends of answers, one for each request that has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = prometheus_client.Counter(
            "surestep:answers",
            "Answers ended, by how; status is that of the error.",
            _LABELS,
            registry=registry,
        )
        self._ends: Counter[Labels] = Counter()

    def expect(self, path: str, *, streams: bool) -> None:
        """Show the ends that alerts look for from the start: a counter that appears is no rate."""
        for streamed in (False, True) if streams else (False,):
            self._counter.labels(*Labels(path, str(streamed).lower(), _COMPLETE))
            for kind in _FAULTS:
                self._counter.labels(*Labels.of_error(path, kind, streamed=streamed))

    def count(self, path: str, ending: Ending) -> None:
        """Count the end of one answer."""
        labels = ending.labels(path)
        self._counter.labels(*labels).inc()
        self._ends[labels] += 1

    def totals(self) -> AnswerTotals:
        """Return the counts so far, of all paths together."""
        ends: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for labels, count in self._ends.items():
            status = int(labels.status)
            if status >= SERVER_FAULT:
                failed[labels.code] += count
                ends["in_streams"] += count * (labels.streamed == "true")
            elif labels.end != "error":
                ends[labels.end] += count
            else:
                ends["refused" if status == _REFUSED.http_status else "wrong"] += count
        return AnswerTotals(failed=failed, **ends)


class TokenHistogram(Collector):
    """Counts on one thread: the library's takes a lock twice for each value, and ten times as
    long. As with the library's, `labels` returns what is observed.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        """`buckets` are upper bounds, ascending, without infinity."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = buckets
        self._children: dict[tuple[str, ...], TokenHistogram] = {}
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def labels(self, *values: str) -> TokenHistogram:
        """Return the histogram of these values of the labels."""
        if values not in self._children:
            self._children[values] = TokenHistogram(self._name, self._text, (), self._bounds)
        return self._children[values]

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> list[int]:
        """Return how many values each bucket has, of all labels together; the last one is beyond
        all bounds."""
        each = (child._counts for child in self._children.values())
        return [sum(column) for column in zip(self._counts, *each, strict=True)]

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
        """Yield the counts up to each bound and the sum, by labels."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._children.items():
            content = Distribution(child._bounds, child._counts, child._sum)
            family.add_metric(values, within(content), content.total)
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
