"""Spans of a request in the scheduler: made when it is over, from its timeline."""

from __future__ import annotations

import time

from surestep_common.tracing import Span

from surestep_scheduler.core.sequence import Sequence
from surestep_scheduler.engine.open_requests import Attempt, Timeline


def tell(span: Span, seq: Sequence, timeline: Timeline, now: float) -> None:
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
