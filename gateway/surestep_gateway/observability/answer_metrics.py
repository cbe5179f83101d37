"""Ends of answers, streams included: complete, with an error, or without their client.

An error inside a stream has status 200 for HTTP; here it has the status, type and code that the
table of errors gives it.
"""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry
from surestep_common.errors import ERROR_TABLE, Cancelled, ErrorKind, QueueFull, kind_of
from surestep_common.tracing import SERVER_FAULT

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
