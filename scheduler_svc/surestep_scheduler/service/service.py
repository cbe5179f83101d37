"""The Scheduler service: requests in, committed tokens out as chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.releases import refuse_unknown
from surestep_common.request_params import check_name
from surestep_common.rpc import tell_num_delivered
from surestep_common.tracing import Tracer
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import supervisor_pb2, worker_pb2
from surestep_proto.scheduler_pb2_grpc import SchedulerServicer

from surestep_scheduler.core.sequence import Finish, Output, TokenLogprobs
from surestep_scheduler.core.sequence import Sequence as TokenSequence
from surestep_scheduler.engine import operations, updates
from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.engine.open_requests import Outbox, RequestOutputs, tell_spans
from surestep_scheduler.engine.wire import logprob_columns
from surestep_scheduler.service import report

from .requests import CacheOwners, ended, parse_request, resolve, settle_adapter

_GENERATE = f"{pb.DESCRIPTOR.services_by_name['Scheduler'].full_name}/Generate"
_CALL = {"rpc.system.name": "grpc", "rpc.method": _GENERATE}  # what spans say of it


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Take a lack of memory for this process's own: another one may have it."""
    try:
        yield
    except MemoryError as error:
        raise Unavailable("the scheduler is out of memory") from error


class SchedulerService(SchedulerServicer):
    """Handlers of scheduler.proto. Errors become statuses in the server's interceptor."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        tracer: Tracer,
        owners: CacheOwners,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Work that outlives a call is one of the `tasks`."""
        self._engine = engine
        self._owners = owners
        self._tracer = tracer
        self.address = address  # the bound one, once the server has started
        self._outboxes = Outboxes()
        self._tasks = tasks
        self._updates: list[asyncio.Task[None]] = []
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
            left_s = context.time_remaining()  # by the wall clock: now
            deadline = None if left_s is None else self._engine.clock() + left_s
            with _memory():
                refuse_unknown(request)
                self._engine.check_model(request.model_fingerprint)
                self._owners.settle(request, headers)
                names = request.adapter, request.tenant
                adapter = await operations.find_adapter(self._engine, *names, deadline)
                limits = self._engine.limits
                self._engine.check_model(request.model_fingerprint)  # it may have waited
                resolved = None  # where a vector is wanted nothing is sampled
                if not request.pooling:
                    resolved = resolve(request, self._engine.model, limits.max_request_len)
                settle_adapter(request, resolved, adapter)
                parsed = parse_request(request, limits.vocab_size, adapter)
                finish = ended(parsed, limits.max_request_len)
            if finish is not None:
                yield ended_chunk(finish, resolved)
                return
            shared = self._outboxes.named(request.delivery.stream_id)
            outbox = shared or Outbox()
            with self._counted(), self._engine.adapters.called(adapter):
                with _memory():
                    if parsed.has_grammar:
                        await self._engine.compile(parsed)
                    opened = await self._engine.submit(parsed, outbox)
                opened.call, opened.resolved = request.delivery.call, resolved
                opened.traced = span.sent
                try:
                    with opened.until(deadline, self._engine.clock):
                        while shared is None and not opened.over:
                            for batch in batches(await outbox.take(), self._engine):
                                for chunk in batch.chunks:
                                    yield chunk
                        await opened.end()
                finally:
                    self._engine.close(opened)
                    if shared is not None:
                        tell_num_delivered(context, opened.num_chunks)
                    if span.sent:
                        tell_spans(span, opened.seq, opened.timeline, self._engine.clock())

    async def Deliver(
        self, request: pb.DeliverRequest, context: Any
    ) -> AsyncGenerator[pb.ChunkBatch, None]:
        """Chunks of the calls of Generate that name this stream, one message per step."""
        with self._outboxes.opened(request.stream_id) as outbox:
            yield pb.ChunkBatch()  # calls may name it now
            while True:
                for batch in batches(await outbox.take(), self._engine):
                    yield batch

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
        epoch = await operations.restart_workers(self._engine, request.reason)
        return pb.RestartWorkersResponse(epoch=epoch, num_ranks=num_ranks)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Stop planning, and end the workers from level 1 on."""
        mode = request.mode or pb.PAUSE_ABORT
        num_aborted = await operations.pause(
            self._engine, request.level, mode, request.tags, clear_cache=request.clear_cache
        )
        held = self._engine.held_weight_bytes if self._engine.pauses.level else 0
        return pb.PauseResponse(num_aborted=num_aborted, held_weight_bytes=held)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Go on, with workers that are started again."""
        asleep = await operations.resume(self._engine, request.tags)
        return pb.ResumeResponse(asleep=asleep, epoch=0 if asleep else self._engine.epoch)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """End open requests where they are."""
        return pb.AbortResponse(num_aborted=self._engine.abort(request.request_ids))

    async def StageWeights(
        self, request_iterator: AsyncIterator[supervisor_pb2.WeightPart], context: Any
    ) -> supervisor_pb2.StagedWeights:
        """Take in weights on every rank, beside the steps."""
        return await updates.stage(self._engine, request_iterator)

    async def UpdateWeights(
        self, request: pb.UpdateWeightsRequest, context: Any
    ) -> pb.UpdateWeightsResponse:
        """Serve what was staged, on all ranks or none, whether or not the caller waits."""
        outcome: asyncio.Future[pb.UpdateWeightsResponse]
        outcome = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._updates.append(self._tasks.create_task(self._update(request, outcome)))
        return await asyncio.shield(outcome)

    async def _update(
        self, request: pb.UpdateWeightsRequest, outcome: asyncio.Future[pb.UpdateWeightsResponse]
    ) -> None:
        try:
            outcome.set_result(await updates.update_weights(self._engine, request))
        except SurestepError as error:
            outcome.set_exception(error)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> worker_pb2.Adapter:
        """Load an adapter on all ranks, or none."""
        loaded = await operations.load_adapter(self._engine, request)
        self._sweep()
        return loaded

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Any
    ) -> worker_pb2.UnloadAdapterResponse:
        """Answer no more requests with an adapter."""
        self._engine.adapters.unload(request.name)
        self._sweep()
        return worker_pb2.UnloadAdapterResponse()

    def _sweep(self) -> None:
        self._updates.append(self._tasks.create_task(operations.sweep_adapters(self._engine)))

    def stop(self) -> None:
        """Leave updates that are under way to the next scheduler."""
        for update in self._updates:
            update.cancel()

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.SchedulerStats:
        """Report counters and gauges."""
        return report.stats(self._engine)


_BATCH_BYTES = 1 << 20  # at least; log-probabilities of prompts take megabytes each

_FINISH = {
    Finish.STOP: pb.STOP,
    Finish.LENGTH: pb.LENGTH,
    Finish.POOLED: pb.POOLED,
    Finish.ABORTED: pb.ABORTED,
}


def batches(ready: Iterable[RequestOutputs], engine: Engine) -> Iterator[pb.ChunkBatch]:
    """Take the outputs of requests, one chunk for all of a request's, in messages that fit."""
    batch, size = pb.ChunkBatch(), 0
    for opened in ready:
        changes, outputs = opened.take_changes(), opened.take()
        if outputs and outputs[-1].error is not None:  # which its call tells
            outputs.pop()
        if not outputs:
            continue
        batch.calls.append(opened.call)
        chunk = batch.chunks.add()
        for first, weights in changes:
            chunk.weights.add(first_token=first, **weights._asdict())
        _fill(chunk, opened, outputs, engine)
        size += chunk.ByteSize()
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = pb.ChunkBatch(), 0
    if batch.calls:
        yield batch


def _fill(
    chunk: pb.GenerateChunk, opened: RequestOutputs, outputs: Sequence[Output], engine: Engine
) -> None:
    """Make one chunk of the outputs of consecutive steps."""
    if opened.traced:
        opened.timeline.tokens(engine.clock())
    opened.num_chunks += 1
    if opened.num_chunks == 1:
        _start(chunk, opened, outputs[0].prompt_logprobs, engine.model_fingerprint)
    for output in outputs:
        chunk.token_ids.extend(output.token_ids)
    if opened.seq.request.want_drafted:
        for output in outputs:
            rest = len(output.token_ids) - output.num_drafted
            chunk.drafted.extend([True] * output.num_drafted + [False] * rest)
    last = outputs[-1]
    if any(output.logprobs for output in outputs):
        _set_logprobs(chunk, outputs)
    if last.finish is not None:
        chunk.pooled = last.pooled
        chunk.finish_reason = _FINISH[last.finish]
        chunk.end.CopyFrom(_end(opened.seq))


def _start(
    chunk: pb.GenerateChunk, opened: RequestOutputs, prompt: TokenLogprobs | None, model: str
) -> None:
    seq = opened.seq
    chunk.start.model_fingerprint = model
    chunk.start.num_cached_tokens = min(seq.num_cached, seq.prompt_len)
    chunk.start.queue_s = seq.queue_s or 0.0
    if opened.resolved is not None:
        chunk.start.resolved.CopyFrom(opened.resolved)
    if prompt is not None:
        chunk.prompt_logprobs.CopyFrom(logprob_columns(prompt, first_row=1))


def _set_logprobs(chunk: pb.GenerateChunk, outputs: Iterable[Output]) -> None:
    logprobs = TokenLogprobs()
    for output in outputs:
        if output.logprobs is not None:
            logprobs.extend(output.logprobs)
    chunk.logprobs.CopyFrom(logprob_columns(logprobs, first_row=0))


def _end(seq: TokenSequence) -> pb.RequestEnd:
    return pb.RequestEnd(
        num_steps=seq.num_steps,
        num_draft_tokens=seq.num_drafts,
        num_accepted_tokens=seq.num_accepted,
        num_preemptions=seq.num_preemptions,
        num_replays=seq.num_replays,
    )


def ended_chunk(finish: Finish, resolved: pb.ResolvedParams | None) -> pb.GenerateChunk:
    """Return the one chunk of a request that had ended before it was resumed."""
    return pb.GenerateChunk(
        start=pb.RequestStart(resolved=resolved),
        finish_reason=_FINISH[finish],
        end=pb.RequestEnd(),
    )


class Outboxes:
    """The outboxes of open calls of Deliver, by the caller's name for each."""

    def __init__(self) -> None:
        self._by_stream: dict[str, Outbox] = {}

    @contextlib.contextmanager
    def opened(self, stream_id: str) -> Iterator[Outbox]:
        """Open an outbox until the end of the block. Raises InvalidRequest, RequestTooLarge."""
        check_name("stream_id", stream_id)
        if not stream_id or stream_id in self._by_stream:
            raise InvalidRequest("a stream needs an id of its own", param="stream_id")
        outbox = self._by_stream[stream_id] = Outbox()
        try:
            yield outbox
        finally:
            del self._by_stream[stream_id]

    def named(self, stream_id: str) -> Outbox | None:
        """Return that of an open stream; None if there is no such stream."""
        return self._by_stream.get(stream_id)
