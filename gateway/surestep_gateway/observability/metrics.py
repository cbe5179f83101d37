"""Prometheus metrics, under the names that vLLM's dashboards use.

Latencies are measured here, where the client's wait is visible. Counters of tokens, blocks, drafts
and faults belong to the schedulers and are read from them at every scrape: `scheduler_metrics`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from surestep_gateway.observability.clients import AnswerMetrics, ClientHistory, TokenHistogram

from .scheduler_metrics import SchedulerCollector, SchedulerReading
from .vllm_metrics import ENGINE, LABELS

F = TypeVar("F", Histogram, TokenHistogram)

_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
_QUEUE_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, *_REQUEST_S)  # an idle server's, too
_STALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LOOK_S = 0.1  # between two looks at the event loop
_WINDOW_S = 60.0
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_CHOICES = (1, 2, 5, 10, 20)


class RequestHistograms:
    """The request histograms of vLLM's dashboards, under their names, each of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)

        def readable(name: str, text: str, buckets: tuple[float, ...]) -> TokenHistogram:
            metric = TokenHistogram(f"vllm:{name}", text, LABELS, buckets)
            registry.register(metric)
            return metric

        self.first_token = readable(
            "time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN_S
        )
        self.inter_token = readable(
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
        self.queue = readable("request_queue_time_seconds", "Waiting for a slot.", _QUEUE_S)
        self.prefill = histogram(
            "request_prefill_time_seconds", "End of waiting to first token.", _REQUEST_S
        )
        self.decode = histogram(
            "request_decode_time_seconds", "First token to last token.", _REQUEST_S
        )
        self.inference = histogram(
            "request_inference_time_seconds", "End of waiting to last token.", _REQUEST_S
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self.computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in a cache.", _TOKENS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated.", _TOKENS
        )
        self.max_tokens = histogram(
            "request_params_max_tokens", "Tokens that may be generated.", _TOKENS
        )
        self.preemptions = histogram(
            "request_num_preemptions", "Times that a request lost its slot.", _PREEMPTIONS
        )
        self.choices = histogram("request_params_n", "Choices of a prompt.", _CHOICES)
        self.most_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest choice.", _TOKENS
        )


class GatewayMetrics:
    def __init__(self, model_names: Sequence[str]) -> None:
        """`model_names` are all values that the label of models will have."""
        self.registry = CollectorRegistry()
        self.scheduler = SchedulerCollector(model_names)
        self.registry.register(self.scheduler)
        self._requests = requests = RequestHistograms(self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._success = counter(
            "vllm:request_success", "Sequences ended, by reason.", *LABELS, "finished_reason"
        )
        self.responses = counter(
            "surestep:http_responses", "HTTP responses but for probes, by status.", "status"
        )
        self.answers = AnswerMetrics(self.registry)
        self.clients = ClientHistory(
            self.answers, requests.first_token, requests.inter_token, requests.queue
        )
        self.resumes = counter(
            "surestep:resumed_requests", "Sequences submitted again after their scheduler was lost."
        )
        self.resumed_tokens = counter(
            "surestep:resumed_tokens",
            "Tokens, prompts included, that were submitted again for that.",
        )
        self.open_requests = Gauge(
            "surestep:gateway_open_requests", "Generation requests open.", registry=self.registry
        )
        self.connections_refused = counter(
            "surestep:connections_refused",
            "Connections refused because too many, or too many files, were open.",
        )
        self.connections_given_up = counter(
            "surestep:connections_given_up",
            "Connections ended because a head did not come, an answer was not read, or others "
            "needed room.",
            "reason",
        )
        for reason in ("head", "send", "room"):
            self.connections_given_up.labels(reason)
        self.text_process_ends = counter(
            "surestep:text_process_ends",
            "Text processes that died, or took too much time or memory over a request.",
            "cause",
        )
        self.event_loop = EventLoopMetrics(self.registry)
        for cause in ("death", "grammar", "memory", "timeout"):
            self.text_process_ends.labels(cause)
        self._of_model = {name: ModelMetrics(name, self) for name in model_names}

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of one of the models."""
        return self._of_model[name]

    def render(self, schedulers: Sequence[SchedulerReading]) -> bytes:
        """Return the exposition text, including the schedulers' current statistics."""
        self.scheduler.update(schedulers)
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model's requests."""

    def __init__(self, model_name: str, metrics: GatewayMetrics) -> None:
        def child(family: F) -> F:
            return family.labels(model_name, ENGINE)

        families = metrics._requests
        self.first_token = child(families.first_token)
        self.inter_token = child(families.inter_token)
        self.queue = child(families.queue)
        self.per_token = child(families.per_token)
        self.request = child(families.request)
        self.prefill = child(families.prefill)
        self.decode = child(families.decode)
        self.inference = child(families.inference)
        self.prompt_tokens = child(families.prompt_tokens)
        self.computed_tokens = child(families.computed_tokens)
        self.generation_tokens = child(families.generation_tokens)
        self.max_tokens = child(families.max_tokens)
        self.preemptions = child(families.preemptions)
        self.choices = child(families.choices)
        self.most_tokens = child(families.most_tokens)
        self._ends = {
            reason: metrics._success.labels(model_name, ENGINE, reason)
            for reason in ("stop", "length", "repetition", "abort", "error")
        }
        self.resumes, self.resumed_tokens = metrics.resumes, metrics.resumed_tokens

    def count_end(self, reason: str) -> None:
        """Count the end of one sequence; `reason` is as in `SequenceEnd`."""
        self._ends[reason].inc()


class EventLoopMetrics:
    """Measures how late the event loop runs what is due, a delay of every request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stalls = Histogram(
            "surestep:event_loop_stall_seconds",
            "How late the event loop of the gateway woke a task, measured all the time.",
            buckets=_STALL_S,
            registry=registry,
        )
        self._busy = Histogram(
            "surestep:event_loop_busy_seconds",
            "The same, for as long as its thread computed: others had the CPU for the rest.",
            buckets=_STALL_S,
            registry=registry,
        )
        self._longest = Gauge(
            "surestep:event_loop_longest_stall_seconds",
            "The longest of them in the last one to two minutes.",
            registry=registry,
        )
        self._window = 0.0  # when the present minute ends
        self._maxima = (0.0, 0.0)  # of the minute before and of the present one

    async def watch(self) -> None:
        """Measure, until cancelled. No task is woken for it: a look costs half as much."""
        loop = asyncio.get_running_loop()
        self._look_later(loop)
        try:
            await loop.create_future()
        finally:
            self._timer.cancel()

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due, self._used = time.monotonic() + _LOOK_S, time.thread_time()
        self._timer = loop.call_later(_LOOK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        late_s = max(0.0, now - self._due)
        self._note(late_s, now)
        self._busy.observe(min(late_s, time.thread_time() - self._used))
        self._look_later(loop)

    def _note(self, stall_s: float, now: float) -> None:
        self._stalls.observe(stall_s)
        before, present = self._maxima
        if now > self._window:
            self._window = now + _WINDOW_S
            before, present = present, 0.0
        maxima = before, max(present, stall_s)
        if maxima != self._maxima:
            self._longest.set(max(maxima))
        self._maxima = maxima


class SequenceEnd(NamedTuple):
    reason: str  # stop, length, repetition, abort or error
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    tokens: int  # that came
    max_tokens: int  # that might have come
    preemptions: int


class SequenceTimer:
    """Measures the latencies of one sequence. `arrived` is on the clock of time.perf_counter."""

    def __init__(self, metrics: ModelMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._queue_s = 0.0
        self._first = 0.0
        self._last = 0.0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token, None without one."""
        return self._first - self._arrived if self._first else None

    def started(self, queue_s: float) -> None:
        """Record the start of the sequence after `queue_s` seconds in the scheduler's queue."""
        self._queue_s = queue_s
        self._metrics.queue.observe(queue_s)

    def tokens(self) -> None:
        """Record the arrival of tokens."""
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token.observe(now - self._last)
        else:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
        self._last = now

    def resumed(self, times: int, tokens: int) -> None:
        """Record resumptions after a lost scheduler; `tokens` were sent again."""
        self._metrics.resumes.inc(times)
        self._metrics.resumed_tokens.inc(tokens)

    def finished(self, end: SequenceEnd) -> None:
        """Record the end of the sequence."""
        self._metrics.count_end(end.reason)
        if end.reason in ("abort", "error") or not self._first:
            return
        requests = self._metrics
        scheduled = self._arrived + self._queue_s
        requests.request.observe(self._last - self._arrived)
        requests.inference.observe(max(0.0, self._last - scheduled))
        requests.prefill.observe(max(0.0, self._first - scheduled))
        requests.decode.observe(self._last - self._first)
        if end.tokens > 1:
            requests.per_token.observe((self._last - self._first) / (end.tokens - 1))
        requests.prompt_tokens.observe(end.prompt_tokens)
        requests.computed_tokens.observe(max(0, end.prompt_tokens - end.cached_tokens))
        requests.generation_tokens.observe(end.tokens)
        requests.max_tokens.observe(end.max_tokens)
        requests.preemptions.observe(end.preemptions)
