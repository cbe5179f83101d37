"""A scheduler whose answers the test writes: real gRPC on loopback, no model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from support.patience import PATIENCE_S
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_common.request_params import neutral
from surestep_common.rpc import Server, tell_num_delivered
from surestep_proto import scheduler_pb2, scheduler_pb2_grpc
from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_proto.scheduler_pb2 import (
    LENGTH,
    POOLED,
    STOP,
    ChunkBatch,
    DeliverRequest,
    GenerateChunk,
    GenerateRequest,
    LoadAdapterRequest,
    RequestEnd,
    RequestStart,
    RestartWorkersResponse,
    SchedulerInfo,
    SchedulerStats,
    SchedulerStatus,
)
from surestep_proto.worker_pb2 import Adapter


class Deliveries:
    """One chunk per message. With `known` off there are no such streams, as in older releases."""

    def __init__(self, *, known: bool = True) -> None:
        self._known = known
        self._outboxes: dict[str, asyncio.Queue[ChunkBatch | None]] = {}

    async def send(self, request: GenerateRequest, chunk: GenerateChunk) -> None:
        """Send a chunk; its call must not end before."""
        outbox = self._outboxes[request.delivery.stream_id]
        await outbox.put(ChunkBatch(calls=[request.delivery.call], chunks=[chunk]))
        await outbox.join()

    async def batches(self, request: DeliverRequest, context: Any) -> AsyncIterator[ChunkBatch]:
        """What a call of Deliver answers."""
        if not self._known:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        outbox = self._outboxes[request.stream_id] = asyncio.Queue()
        yield ChunkBatch()
        while (batch := await outbox.get()) is not None:
            outbox.task_done()  # the call may end now, behind the chunk: it is sent without a wait
            yield batch
        raise Unavailable("the stream broke")

    async def break_all(self) -> None:
        """Lose the streams, and nothing else."""
        outboxes, self._outboxes = self._outboxes, {}
        for outbox in outboxes.values():
            await outbox.put(None)


SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"]
Script = Callable[[GenerateRequest], AsyncIterator[GenerateChunk]]


def default_info(**changes: Any) -> SchedulerInfo:
    """Facts that fit the tiny tokenizer."""
    facts: dict[str, Any] = {
        "model_path": "/models/tiny",
        "vocab_size": 400,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_queue_len": 64,
        "eos_token_ids": [2],
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "num_blocks": 128,
        "max_pooled_len": 256,
        "hidden_size": 8,
        "defaults": neutral(),
    }
    return SchedulerInfo(**(facts | changes))


def start(num_cached: int = 0, model: str = "") -> GenerateChunk:
    """The chunk that says the request runs, and on which model."""
    begun = RequestStart(num_cached_tokens=num_cached, queue_s=0.001, model_fingerprint=model)
    return GenerateChunk(start=begun)


def tokens(ids: Sequence[int], *, finish: int = 0, logprobs: bool = False) -> GenerateChunk:
    """A chunk of tokens; with `finish` the last one."""
    chunk = GenerateChunk(token_ids=ids)
    if logprobs:
        chunk.logprobs.CopyFrom(logprob_columns(ids, num_top=2))
    if finish:
        chunk.finish_reason = finish  # type: ignore[assignment]
        chunk.end.CopyFrom(RequestEnd(num_steps=1))
    return chunk


def logprob_columns(ids: Sequence[int], *, num_top: int, first_row: int = 0) -> LogprobColumns:
    """Invented values: every token has -0.5 and rank 1, its i-th alternative -(i + 0.5)."""
    columns = LogprobColumns()
    for row, token in enumerate(ids, start=first_row):
        columns.row.append(row)
        columns.token_id.append(token)
        columns.logprob.append(-0.5)
        columns.rank.append(1)
        columns.num_top.append(num_top)
        columns.top_token_ids.extend((token + i) % 400 for i in range(num_top))
        columns.top_logprobs.extend(-(i + 0.5) for i in range(num_top))
    return columns


def emulate(request: GenerateRequest, position: int) -> int:
    """Token at an absolute position: a function of prompt, seed and position, like the real one."""
    mixed = (request.sampling.seed ^ sum(request.prompt_ids) * 31 + position * 2654435761) >> 3
    return 3 + mixed % 250


def emulated(request: GenerateRequest) -> list[int]:
    """Tokens that `request` still has to emit until its length is reached."""
    first = len(request.prompt_ids) + len(request.emitted_ids)
    unsaid = default_info().max_model_len - len(request.prompt_ids)
    end = len(request.prompt_ids) + (request.max_tokens or unsaid)
    return [emulate(request, position) for position in range(first, end)]


def emulated_vector(
    prompt_ids: Sequence[int], pooling: int, label_ids: Sequence[int] = ()
) -> list[float]:
    """Another one for every prompt and pooling, and not normalised; or the logits of labels."""
    mixed = sum((place + 1) * token for place, token in enumerate(prompt_ids)) * 4 + pooling
    if label_ids:
        return [mixed * label % 97 / 16 for label in label_ids]
    return [float((mixed >> shift) % 97 - 40) for shift in range(8)]


def pooled(request: GenerateRequest) -> GenerateChunk:
    """The one chunk that answers a request for a vector."""
    chunk = start()
    vector = emulated_vector(request.prompt_ids, request.pooling, request.label_ids)
    chunk.pooled = struct.pack(f"<{len(vector)}f", *vector)
    chunk.finish_reason = POOLED
    chunk.end.CopyFrom(RequestEnd(num_steps=1))
    return chunk


async def emulating(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    """The script that is used unless a test sets another: runs to max_tokens."""
    if request.pooling:
        yield pooled(request)
        return
    sampling = request.sampling
    opening = start()
    if sampling.want_prompt_logprobs:
        columns = logprob_columns(
            request.prompt_ids[1:], num_top=sampling.num_top_prompt_logprobs, first_row=1
        )
        opening.prompt_logprobs.CopyFrom(columns)
    yield opening
    ids = emulated(request)
    for token in ids[:-1]:
        yield _with_logprobs(tokens([token]), request)
    yield _with_logprobs(tokens(ids[-1:], finish=LENGTH), request)


def _with_logprobs(chunk: GenerateChunk, request: GenerateRequest) -> GenerateChunk:
    if request.sampling.want_logprobs:
        top = request.sampling.num_top_logprobs
        chunk.logprobs.CopyFrom(logprob_columns(chunk.token_ids, num_top=top))
    return chunk


def replay(ids: Sequence[int], *, finish: int = STOP, chunk: int = 1) -> Script:
    """A script that sends these tokens, `chunk` at a time."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        yield start()
        left = list(ids)[len(request.emitted_ids) :]
        while len(left) > chunk:
            yield _with_logprobs(tokens(left[:chunk]), request)
            left = left[chunk:]
        yield _with_logprobs(tokens(left, finish=finish), request)

    return script


def failing(error: Exception, after: Sequence[int] = ()) -> Script:
    """A script that fails with `error`, after these tokens."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if after:
            yield start()
            yield tokens(after)
        raise error

    return script


def losing(ids: Sequence[int], after: int) -> Script:
    """A scheduler that is lost after so many of `ids`; the resumed request gets the others."""
    lost, resumed = (
        failing(Unavailable("the epoch ended"), ids[:after]),
        replay(ids, chunk=len(ids)),
    )
    return lambda request: (resumed if request.emitted_ids else lost)(request)


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):  # untyped base
    """`script` answers each Generate call; the lists record what happened."""

    script: Script = emulating
    info: SchedulerInfo = field(default_factory=default_info)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    status: SchedulerStatus = field(default_factory=SchedulerStatus)  # besides what all say
    requests: list[GenerateRequest] = field(default_factory=list)
    time_remaining: list[float] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)  # of the calls
    restarts: list[str] = field(default_factory=list)  # reasons
    loads: list[LoadAdapterRequest] = field(default_factory=list)
    load_fault: Exception | None = None
    num_info: int = 0  # times that Info was asked for
    num_status: int = 0  # times that Status was asked for
    deliveries: Deliveries = field(default_factory=Deliveries)
    hanging: bool = False
    trouble: str = ""  # why it has no Info to give
    restarting: asyncio.Event | None = None
    num_open: int = 0
    num_cancelled: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._server: Server | None = None

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[Any]:
        """Plays the script; a request id may be open only once."""
        self.requests.append(request)
        self.time_remaining.append(context.time_remaining() or 0.0)
        self.metadata.append(dict(context.invocation_metadata()))
        if not request.prompt_ids:
            raise InvalidRequest("prompt_ids must be set", param="prompt_ids")
        self.num_open += 1
        await self._notify()
        num_delivered = 0
        try:
            async with contextlib.aclosing(self.script(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if request.HasField("delivery"):
                        await self.deliveries.send(request, chunk)
                        num_delivered += 1
                    else:
                        yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            tell_num_delivered(context, num_delivered)
            self.num_open -= 1
            await asyncio.shield(self._notify())

    async def Deliver(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for batch in self.deliveries.batches(request, context):
            yield batch

    async def Info(self, request: Any, context: Any) -> SchedulerInfo:
        self.num_info += 1
        await self._notify()
        if self.trouble:
            raise Unavailable(self.trouble)
        return self.info

    async def Stats(self, request: Any, context: Any) -> SchedulerStats:
        """Nothing while `hanging`, as from a process that is stopped."""
        while self.hanging:
            await asyncio.sleep(0.01)
        return self.stats

    async def LoadAdapter(self, request: LoadAdapterRequest, context: Any) -> Adapter:
        """Not before `restarting` is set, if it is there."""
        self.loads.append(request)
        if self.restarting is not None:
            await self.restarting.wait()
        if self.load_fault is not None:
            raise self.load_fault
        return self.add_adapter(request.name, request.path, request.digest)

    def add_adapter(self, name: str, path: str, digest: str) -> Adapter:
        self.stats.adapters.add(name=name, digest=digest)
        return self.info.adapters.add(name=name, path=path, digest=digest)

    async def RestartWorkers(self, request: Any, context: Any) -> RestartWorkersResponse:
        """Not serving until `restarting` is set, if it is there."""
        self.restarts.append(request.reason)
        await self.set_serving(False)
        if self.restarting is not None:
            await self.restarting.wait()
        await self.set_serving(True)
        return RestartWorkersResponse(epoch=3, num_ranks=2)

    async def Status(self, request: Any, context: Any) -> SchedulerStatus:
        """Nothing while `hanging`."""
        self.num_status += 1
        while self.hanging:
            await asyncio.sleep(0.01)
        told = SchedulerStatus(
            pid=1, address=f"127.0.0.1:{self.port}", state=scheduler_pb2.SERVING, epoch=3, step=7
        )
        told.MergeFrom(self.status)
        return told

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(
        self, condition: Callable[[FakeScheduler], bool], timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until `condition` holds; calls starting and ending are what changes it."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def start(self, *, serving: bool = True) -> None:
        """Listen; a second start takes the same port again."""
        self._server = Server([SERVICE])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server.grpc)
        self.port = await self._server.start(f"127.0.0.1:{self.port}")
        await self._server.set_serving(serving)

    async def set_serving(self, serving: bool) -> None:
        """Change the health of the service."""
        self.info.draining = False
        assert self._server is not None
        await self._server.set_serving(serving)

    async def drain(self) -> None:
        """Admit nothing more, and say why."""
        assert self._server is not None
        self.info.draining = True
        await self._server.set_serving(False)

    async def stop(self) -> None:
        """Go away at once, as a crash would."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[FakeScheduler]:
    """A fake scheduler that serves."""
    scheduler = FakeScheduler(**options)
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()
