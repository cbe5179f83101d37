"""Open requests: their readers, the outputs not taken yet, and the times of their attempts.

When a request is over, its spans are made from these times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from surestep_common.errors import DeadlineExceeded, SurestepError
from surestep_common.tracing import Span
from surestep_proto.scheduler_pb2 import ResolvedParams

from surestep_scheduler.core.sequence import Output, Sequence, Tenancy

_KEPT = 32  # the newest ones, of a request that gives up its slot again and again


@dataclass(slots=True)
class Attempt:
    """From the queue to the end of a stay in a slot. Times are on the scheduler's clock."""

    queued_at: float
    admitted_at: float | None = None
    first_at: float | None = None  # tokens came
    last_at: float | None = None
    ended_at: float | None = None
    lost: bool = False  # the workers were, and the next attempt goes on from here


class Timeline:
    """The attempts at a request, oldest first. There is more than one after the loss of workers,
    or when the request gave its slot up for others."""

    def __init__(self, arrived: float) -> None:
        self.attempts = deque([Attempt(arrived)], maxlen=_KEPT)

    def admitted(self, now: float) -> None:
        """Begin a stay in a slot. An earlier stay ended with its last tokens."""
        newest = self.attempts[-1]
        if newest.admitted_at is not None:
            newest.ended_at = newest.last_at or newest.admitted_at
            self.attempts.append(Attempt(newest.ended_at))
        self.attempts[-1].admitted_at = now

    def tokens(self, now: float) -> None:
        """Note that tokens came; those read after their workers were lost begin nothing."""
        newest = self.attempts[-1]
        if newest.admitted_at is None:
            return
        newest.first_at = newest.first_at or now
        newest.last_at = now

    def lost(self, now: float) -> None:
        """End an attempt in a slot, as the workers are gone; what waits goes on waiting."""
        newest = self.attempts[-1]
        if newest.admitted_at is not None:
            newest.ended_at, newest.lost = now, True
            self.attempts.append(Attempt(now))

    def end(self, now: float) -> None:
        """End the newest attempt."""
        self.attempts[-1].ended_at = now


def tell_spans(span: Span, seq: Sequence, timeline: Timeline, now: float) -> None:
    """Describe a request that is over, and each attempt at it: queue, prefill, decode.

    `now` is on the scheduler's clock.
    """
    timeline.end(now)
    clock = _Clock(now)
    span.set(
        {
            "gen_ai.request.id": seq.request.id,
            "gen_ai.usage.input_tokens": seq.prompt_len,
            "gen_ai.usage.output_tokens": len(seq.tokens) - seq.prompt_len,
            "gen_ai.latency.time_in_queue": seq.queue_s or 0.0,
            "surestep.cached_tokens": seq.num_cached,
            "surestep.draft_tokens": seq.num_drafts,
            "surestep.accepted_tokens": seq.num_accepted,
            "surestep.steps": seq.num_steps,
            "surestep.preemptions": seq.num_preemptions,
            "surestep.replays": seq.num_replays,
        }
    )
    failed: Span | None = None
    for number, attempt in enumerate(timeline.attempts):
        last = _tell_attempt(span, attempt, number, failed, clock)
        failed = last if attempt.lost else None


class _Clock:
    """From the scheduler's clock to that of spans."""

    def __init__(self, now: float) -> None:
        self._now, self._now_ns = now, time.time_ns()

    def ns(self, at: float) -> int:
        """`at` is on the scheduler's clock."""
        return self._now_ns - round(1e9 * (self._now - at))


def _tell_attempt(
    span: Span, attempt: Attempt, number: int, after: Span | None, clock: _Clock
) -> Span:
    """Spans of an attempt, each linked to the one that was lost, if there was one; the last."""
    assert attempt.ended_at is not None
    marks = [
        ("queue", attempt.queued_at),
        ("prefill", attempt.admitted_at),
        ("decode", attempt.first_at),
    ]
    known = [(name, at) for name, at in marks if at is not None]
    ends = [*(at for _, at in known[1:]), attempt.ended_at]
    part = span
    for left, ((name, began), ended) in enumerate(zip(known, ends, strict=True), 1 - len(known)):
        attributes = {"surestep.attempt": number}
        began_ns = clock.ns(began)
        part = span.child(name, attributes=attributes, after=after, began_ns=began_ns)
        if attempt.lost and not left:
            part.fail("worker_lost", "the workers were lost; the next attempt goes on from here")
        part.end(clock.ns(ended))
    return part


class Outbox:
    """The requests of one reader that have outputs it has not taken."""

    def __init__(self) -> None:
        self._ready: list[RequestOutputs] = []
        self._loop = asyncio.get_running_loop()  # asking for it each time is a call of the system
        self._waiting: asyncio.Future[None] | None = None

    def add(self, opened: RequestOutputs) -> None:
        """Note that a request has outputs; it had none since it was taken."""
        self._ready.append(opened)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[RequestOutputs]:
        """Wait for outputs; return the requests that have some, in the order in which they came."""
        while not self._ready:
            self._waiting = self._loop.create_future()
            await self._waiting
        ready, self._ready = self._ready, []
        return ready


class Weights(NamedTuple):
    """Weights that tokens come from."""

    version: str
    model_fingerprint: str


class RequestOutputs:
    """The outputs of an open request that its reader has not taken yet; at most max_len tokens."""

    def __init__(self, seq: Sequence, outbox: Outbox) -> None:
        self.seq = seq
        self.call = 0  # the reader's number of it
        self.resolved: ResolvedParams | None = None  # to be told with the first chunk
        self.num_chunks = 0  # that were made of its outputs
        self.traced = False
        self.timeline = Timeline(seq.arrival)
        self._outbox = outbox
        self._outputs: list[Output] = []
        self._last: Output | None = None  # the one that ends it
        self._weights: Weights | None = None  # of the newest token
        self._changes: list[tuple[int, Weights]] = []  # by tokens among the outputs before them
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()  # the last one was taken

    @property
    def over(self) -> bool:
        """Return whether the reader has taken the last output."""
        return self._over.done()

    def put(self, output: Output, weights: Weights | None = None) -> None:
        """Hand an output of these weights to the reader, unless one has ended the request."""
        if self._last is not None:
            return
        if weights != self._weights and weights is not None:
            self._weights = weights
            self._changes.append((sum(len(one.token_ids) for one in self._outputs), weights))
        if output.finish is not None or output.error is not None:
            self._last = output
        self._outputs.append(output)
        if len(self._outputs) == 1:
            self._outbox.add(self)

    def take_changes(self) -> list[tuple[int, Weights]]:
        """Return the weights that are new since the last call, and the tokens before them among the
        outputs that `take` returns.
        """
        changes, self._changes = self._changes, []
        return changes

    def take(self) -> list[Output]:
        """Return all outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        if self._last is not None and not self._over.done():
            self._over.set_result(None)
        return outputs

    async def end(self) -> None:
        """Wait until the reader has taken the last output. Raises the error that it was."""
        await self._over
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error

    @contextlib.contextmanager
    def until(self, deadline: float | None, clock: Callable[[], float]) -> Iterator[None]:
        """Let the request end, with DeadlineExceeded, at that time of the clock.

        One timer for all of its tokens: a timeout around each costs more than the token.
        """
        if deadline is None:
            yield
            return
        timer = self._loop.call_later(max(deadline - clock(), 0.0), self._expire)
        try:
            yield
        finally:
            timer.cancel()

    def _expire(self) -> None:
        late = DeadlineExceeded("the request's deadline has passed")
        self.put(Output(self.seq, array("I"), error=late))


class OpenRequests:
    """The outputs of all open requests by id, until the output that ends each."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestOutputs] = {}
        self.weights: Weights | None = None  # that are served

    def __getitem__(self, request_id: str) -> RequestOutputs:
        return self._by_id[request_id]

    def open(self, seq: Sequence, outbox: Outbox) -> RequestOutputs:
        """Open a request."""
        opened = RequestOutputs(seq, outbox)
        self._by_id[seq.request.id] = opened
        return opened

    def close(self, opened: RequestOutputs) -> bool:
        """Close a request whose reader is gone. Returns False when it has ended already."""
        request_id = opened.seq.request.id
        if self._by_id.get(request_id) is not opened:
            return False
        del self._by_id[request_id]
        return True

    def admitted(self, tenancies: Iterable[Tenancy], now: float) -> None:
        """Note that these moved into slots."""
        for tenancy in tenancies:
            self._by_id[tenancy.seq.request.id].timeline.admitted(now)

    def lost(self, now: float) -> None:
        """Note that the workers are gone: requests that were in slots wait again."""
        for opened in self._by_id.values():
            opened.timeline.lost(now)

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand outputs to the readers."""
        for output in outputs:
            request_id = output.seq.request.id
            has_tokens = bool(output.token_ids or output.pooled)
            self._by_id[request_id].put(output, self.weights if has_tokens else None)
            if output.finish is not None or output.error is not None:
                del self._by_id[request_id]

    def fail(self, seq: Sequence, error: SurestepError) -> None:
        """End a request with an error."""
        self.deliver([Output(seq, array("I"), error=error)])


def named(sequences: Iterable[Sequence], ids: Collection[str]) -> list[Sequence]:
    """Return those whose request has one of these ids, alone or with a dash and more behind it;
    without ids all.
    """
    beginnings = tuple(f"{id_}-" for id_ in ids)
    return [
        seq
        for seq in sequences
        if not ids or seq.request.id in ids or seq.request.id.startswith(beginnings)
    ]
