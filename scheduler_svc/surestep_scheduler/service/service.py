"""The Scheduler service: requests in, committed tokens out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from surestep_common.tracing import Tracer
from surestep_proto import scheduler_pb2 as pb
from surestep_proto.scheduler_pb2_grpc import SchedulerServicer

from surestep_scheduler.core.sequence import Finish, Output, TokenLogprobs
from surestep_scheduler.core.sequence import Sequence as TokenSequence
from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.engine.open_requests import RequestOutputs
from surestep_scheduler.engine.wire import logprob_columns

from . import report
from .request_spans import tell
from .requests import ended, parse_request
from .resolve import resolve

_GENERATE = f"{pb.DESCRIPTOR.services_by_name['Scheduler'].full_name}/Generate"
_CALL = {"rpc.system.name": "grpc", "rpc.method": _GENERATE}  # what spans say of it
_FINISH = {Finish.STOP: pb.STOP, Finish.LENGTH: pb.LENGTH, Finish.POOLED: pb.POOLED}


class SchedulerService(SchedulerServicer):
    """Handlers of scheduler.proto. Errors become statuses in the server's interceptor."""

    def __init__(self, engine: Engine, address: str, tracer: Tracer) -> None:
        self._engine = engine
        self._tracer = tracer
        self.address = address  # the bound one, once the server has started
        self._num_calls = 0  # of Generate
        self._quiet = asyncio.Event()  # no call of Generate is open
        self._quiet.set()

    async def wait_until_quiet(self, timeout_s: float) -> None:
        """Return when no request is open, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_calls += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._quiet.set()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Tokens of one sequence as they are committed, or the vector of its prompt.

        Cancelling the call aborts the request.
        """
        headers, about = context.invocation_metadata(), _CALL
        with self._tracer.begin(_GENERATE, headers, attributes=about) as span:
            limits = self._engine.limits
            self._engine.check_model(request.model_fingerprint)
            resolved = None  # where a vector is wanted nothing is sampled
            if not request.pooling:
                resolved = resolve(request, self._engine.model, limits.max_request_len)
            parsed = parse_request(request, limits.vocab_size)
            finish = ended(parsed, limits.max_request_len)
            if finish is not None:
                yield _ended_chunk(finish, resolved)
                return
            with self._counted():
                if parsed.has_grammar:
                    await self._engine.compile(request.sampling.grammar)
                opened = await self._engine.submit(parsed)
                try:
                    with opened.within(context.time_remaining()):
                        done = False
                        while not done:
                            outputs = await opened.get()
                            done = outputs[-1].finish is not None
                            tokens = [output for output in outputs if output.error is None]
                            if tokens:
                                if span.sent:
                                    opened.timeline.tokens(self._engine.clock())
                                yield self._next_chunk(opened, tokens, resolved)
                            if outputs[-1].error is not None:
                                raise outputs[-1].error
                finally:
                    self._engine.close(opened)
                    if span.sent:
                        tell(span, opened.seq, opened.timeline, self._engine.clock())

    def _next_chunk(
        self,
        opened: RequestOutputs,
        tokens: Sequence[Output],
        resolved: pb.ResolvedParams | None,
    ) -> pb.GenerateChunk:
        chunk = _chunk(opened, tokens)
        if not opened.started:
            opened.started = True
            self._start(chunk, opened.seq, tokens[0].prompt_logprobs)
            if resolved is not None:
                chunk.start.resolved.CopyFrom(resolved)
        return chunk

    def _start(
        self, chunk: pb.GenerateChunk, seq: TokenSequence, prompt: TokenLogprobs | None
    ) -> None:
        chunk.start.model_fingerprint = self._engine.model_fingerprint
        chunk.start.num_cached_tokens = min(seq.num_cached, seq.prompt_len)
        chunk.start.queue_s = seq.queue_s or 0.0
        if prompt is not None:
            chunk.prompt_logprobs.CopyFrom(logprob_columns(prompt, first_row=1))

    async def Info(self, request: pb.SchedulerInfoRequest, context: Any) -> pb.SchedulerInfo:
        """Facts of the served model. Raises Unavailable until every rank is ready."""
        return report.info(self._engine)

    async def Status(self, request: pb.SchedulerStatusRequest, context: Any) -> pb.SchedulerStatus:
        """Report the processes behind this scheduler."""
        return await report.status(self._engine, self.address, request.num_steps)

    async def RestartWorkers(
        self, request: pb.RestartWorkersRequest, context: Any
    ) -> pb.RestartWorkersResponse:
        """Replace every rank. Raises Unavailable when they are being replaced already."""
        num_ranks = len(self._engine.infos)
        epoch = await self._engine.restart_workers(request.reason)
        return pb.RestartWorkersResponse(epoch=epoch, num_ranks=num_ranks)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.SchedulerStats:
        """Report counters and gauges."""
        return report.stats(self._engine)


def _chunk(opened: RequestOutputs, outputs: Sequence[Output]) -> pb.GenerateChunk:
    """Make one chunk of the outputs of consecutive steps."""
    chunk = pb.GenerateChunk(token_ids=[id_ for output in outputs for id_ in output.token_ids])
    if opened.seq.request.want_drafted:
        for output in outputs:
            rest = len(output.token_ids) - output.num_drafted
            chunk.drafted.extend([True] * output.num_drafted + [False] * rest)
    logprobs = TokenLogprobs()
    for output in outputs:
        if output.logprobs is not None:
            logprobs.extend(output.logprobs)
    if logprobs.token_id:
        chunk.logprobs.CopyFrom(logprob_columns(logprobs, first_row=0))
    finish, chunk.pooled = outputs[-1].finish, outputs[-1].pooled
    if finish is not None:
        chunk.finish_reason = _FINISH[finish]
        _end(chunk, opened.seq)
    return chunk


def _end(chunk: pb.GenerateChunk, seq: TokenSequence) -> None:
    chunk.end.CopyFrom(
        pb.RequestEnd(
            num_steps=seq.num_steps,
            num_draft_tokens=seq.num_drafts,
            num_accepted_tokens=seq.num_accepted,
            num_preemptions=seq.num_preemptions,
            num_replays=seq.num_replays,
        )
    )


def _ended_chunk(finish: Finish, resolved: pb.ResolvedParams | None) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        start=pb.RequestStart(resolved=resolved),
        finish_reason=_FINISH[finish],
        end=pb.RequestEnd(),
    )
