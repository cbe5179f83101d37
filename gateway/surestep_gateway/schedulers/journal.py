"""The journal of an open request, and resumption from it when its scheduler is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from surestep_common import tracing
from surestep_common.errors import ConnectionLost, DeadlineExceeded, QueueFull, Unavailable
from surestep_common.tenants import cache_root
from surestep_common.tracing import Span, SpanKind
from surestep_proto.sampling_pb2 import NO_POOLING, Pooling, SamplingParams
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest, ResolvedParams

from surestep_gateway.api_keys import ANYBODY, Tenant
from surestep_gateway.schedulers.losses import LossHistory
from surestep_gateway.schedulers.pool import Siblings, prefix_key, session_key
from surestep_gateway.settings.config import GatewaySettings

from .generate_call import GenerateCall
from .pool import SchedulerPool
from .scheduler_client import GENERATE, SchedulerClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RESUMES = 5  # in a row, of a request that gets no token in between


@dataclass(slots=True, kw_only=True)
class Journal:
    """Everything needed to resume one sequence elsewhere. `emitted_ids` only grows."""

    request_id: str
    prompt_ids: Sequence[int]  # quickest as a message's column, and shared by siblings
    max_tokens: int | None = None  # None = the model's default
    sampling: SamplingParams = field(default_factory=SamplingParams)  # shared by siblings
    ignore_eos: bool = False
    pooling: Pooling = NO_POOLING  # any other: a vector is wanted, and no tokens
    label_ids: Sequence[int] = ()  # of a vector of logits
    seed: int = 0  # of this sequence
    tenant: Tenant = ANYBODY
    session: str = ""  # whose requests go to one scheduler, whatever their prompts
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # name; empty = the model itself
    num_draft_tokens: int | None = None
    want_drafted: bool = False  # mark which tokens were drafts
    emitted_ids: list[int] = field(default_factory=list)
    started: bool = False  # a scheduler has run this request
    model_fingerprint: str = ""  # of the model that the newest token is from
    # Versions of the weights that its tokens are from, by the first token of each.
    weight_versions: list[tuple[int, str]] = field(default_factory=list)
    resolved: ResolvedParams | None = None  # what it was begun with
    num_calls: int = 0  # that were opened for it
    num_resumes: int = 0  # calls that were lost and made up for
    num_resumed_tokens: int = 0  # that were sent again for it, prompts included

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that may come, 0 while unknown."""
        return self.resolved.max_tokens if self.resolved is not None else self.max_tokens or 0

    @property
    def weight_version(self) -> str:
        """Version that the newest token is from; empty before the first."""
        return self.weight_versions[-1][1] if self.weight_versions else ""

    @property
    def prefix_root(self) -> bytes:
        """Equal for requests that may find each other's prefixes."""
        return cache_root(self.tenant.cache_owner, self.cache_salt, self.adapter)

    def request(self) -> GenerateRequest:
        """Return the call that starts or resumes the sequence."""
        suffix = f".{self.num_calls}" if self.num_calls else ""
        self.num_calls += 1
        request = GenerateRequest(
            request_id=self.request_id + suffix,
            emitted_ids=self.emitted_ids,
            max_tokens=self.max_tokens,
            pooling=self.pooling,
            label_ids=self.label_ids,
            priority=self.priority,
            cache_owner=self.tenant.cache_owner,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            num_draft_tokens=self.num_draft_tokens,
            want_drafted=self.want_drafted,
            tenant=self.tenant.name,
            tenant_weight=self.tenant.weight,
            model_fingerprint=self.model_fingerprint,
            ignore_eos=self.ignore_eos,
            resolved=self.resolved,
        )
        request.prompt_ids.MergeFrom(self.prompt_ids)  # at the speed of memory if they are packed
        if not self.pooling:
            self._set_sampling(request.sampling)
        return request

    def _set_sampling(self, sampling: SamplingParams) -> None:
        sampling.CopyFrom(self.sampling)
        sampling.seed = self.seed
        if self.started:  # these came with the first chunk
            sampling.want_prompt_logprobs = False

    def record(self, chunk: GenerateChunk) -> None:
        """Record the tokens and facts of a chunk."""
        if not self.started and chunk.start.HasField("resolved"):
            self.resolved = ResolvedParams()
            self.resolved.CopyFrom(chunk.start.resolved)  # the chunk itself may be large
        self.started = True
        self.model_fingerprint = self.model_fingerprint or chunk.start.model_fingerprint
        for weights in chunk.weights:
            self.model_fingerprint = weights.model_fingerprint or self.model_fingerprint
            if weights.version != self.weight_version:
                first = len(self.emitted_ids) + weights.first_token
                self.weight_versions.append((first, weights.version))
        self.emitted_ids.extend(chunk.token_ids)

    def resume(self) -> None:
        """Count that the sequence must be resumed in another call."""
        self.num_resumes += 1
        self.num_resumed_tokens += len(self.prompt_ids) + len(self.emitted_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits on the waits of a request, in seconds."""

    admission_s: float  # for a scheduler that takes the request at all
    first_token_s: float
    inter_token_s: float
    resume_s: float
    max_resumes: int  # without a token in between

    @classmethod
    def of(cls, settings: GatewaySettings) -> Timeouts:
        return cls(
            admission_s=settings.admission_timeout_s,
            first_token_s=settings.first_token_timeout_s,
            inter_token_s=settings.inter_token_timeout_s,
            resume_s=settings.resume_timeout_s,
            max_resumes=MAX_RESUMES,
        )


class ResumableStream:
    """The chunks of one sequence, across as many calls as it takes."""

    def __init__(
        self,
        pool: SchedulerPool,
        journal: Journal,
        timeouts: Timeouts,
        deadline: float,
        siblings: Siblings,
    ) -> None:
        """`deadline` of the whole request is in seconds of the event loop's clock."""
        self._pool = pool
        self._journal = journal
        self._timeouts = timeouts
        self._siblings = siblings
        self._record = LossHistory(pool.isolation, journal.request_id, timeouts.max_resumes)
        self._deadline = deadline
        self._key = (
            session_key(journal.prefix_root, journal.session)
            if journal.session
            else prefix_key(journal.prefix_root, journal.prompt_ids)
        )
        self._next: SchedulerClient | None = None  # replaces one that is full
        self._call: GenerateCall | None = None  # the last one
        self._error: Unavailable | None = None  # what ended it
        self._span: Span | None = None  # of the last call
        self._token_by = 0.0  # when the next token is late
        self._waiting_since: float | None = None  # for tokens, without a call that brings them
        self._refused = 0  # calls that failed without a loss since the last token
        self._full = 0  # refusals of full schedulers since the last token
        self._clock = asyncio.get_running_loop().time

    async def chunks(self) -> AsyncGenerator[GenerateChunk, None]:
        """Yield chunks until the one with the finish reason; tokens never repeat and never go
        missing.

        Raise the scheduler's refusal, DeadlineExceeded, Unavailable when resuming failed, or
        ModelChanged when no scheduler serves the model any more with which the output began.
        Closing the generator aborts the request.
        """
        with contextlib.closing(self._record):
            while True:
                await self._in_time(self._record.turn())
                scheduler = await self._scheduler()
                try:
                    with self._calling(scheduler) as call:
                        while True:
                            chunk = await self._read(call)
                            yield chunk
                            if chunk.finish_reason:
                                return
                except QueueFull as error:
                    await self._after_refusal(scheduler, error)
                except Unavailable as error:
                    self._after_loss(scheduler, error)

    async def _in_time(self, wait: Awaitable[T]) -> T:
        """Await within the deadline of the request."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await wait
        except TimeoutError:
            raise self._error or DeadlineExceeded("the request did not finish in time") from None

    async def _scheduler(self) -> SchedulerClient:
        """Return the scheduler to call. Raise Unavailable when none has served for too long."""
        scheduler, self._next = self._next, None
        if scheduler is not None:
            return scheduler
        try:
            what = self._journal.model_fingerprint, self._journal.adapter
            found = self._pool.acquire(self._key, self._time_to_wait(), *what)
            return await self._in_time(found)
        except Unavailable as error:
            raise self._error or error from None

    def _time_to_wait(self) -> float:
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        resuming = self._journal.num_resumes > 0
        timeouts = self._timeouts.resume_s if resuming else self._timeouts.admission_s
        return min(self._waiting_since + timeouts, self._deadline) - self._clock()

    @contextlib.contextmanager
    def _calling(self, scheduler: SchedulerClient) -> Iterator[GenerateCall]:
        """Open a call; leaving the block aborts it unless it is over."""
        self._token_by = self._clock() + self._timeouts.first_token_s
        request, remaining_s = self._journal.request(), self._remaining()
        with (
            self._traced(scheduler, request) as span,
            self._siblings.calling(),
            scheduler.generate(request, remaining_s, span.headers) as call,
        ):
            self._call = call
            yield call

    def _traced(self, scheduler: SchedulerClient, request: GenerateRequest) -> Span:
        """Return a span for a call, linked to that of the call which it resumes."""
        host, port = scheduler.host_and_port
        self._span = tracing.current.get().child(
            GENERATE,
            SpanKind.CLIENT,
            attributes={
                "rpc.system.name": "grpc",
                "rpc.method": GENERATE,
                "server.address": host,
                "server.port": port,
                "gen_ai.request.id": request.request_id,
                "surestep.emitted_tokens": len(request.emitted_ids),
            },
            after=self._span,
        )
        return self._span

    async def _read(self, call: GenerateCall) -> GenerateChunk:
        """Return the next chunk of a call, which is in the journal then."""
        token_by = self._token_by
        try:
            chunk = await call.read(min(token_by, self._deadline))
        except TimeoutError:
            whole = token_by >= self._deadline
            what = "the request did not finish" if whole else "no token came"
            raise DeadlineExceeded(f"{what} in time") from None
        self._journal.record(chunk)
        if chunk.HasField("start"):
            self._siblings.started()
        if chunk.token_ids:
            self._progress()
            self._token_by = self._clock() + self._timeouts.inter_token_s
        return chunk

    def _progress(self) -> None:
        self._error = self._waiting_since = None
        self._refused = self._full = 0
        self._record.token()

    def _remaining(self) -> float:
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceeded("the request did not finish in time")
        return remaining

    async def _after_refusal(self, scheduler: SchedulerClient, error: QueueFull) -> None:
        """Choose another scheduler, once; an accepted request then waits, as all of them come
        back.
        """
        self._full += 1
        what = self._journal.model_fingerprint, self._journal.adapter
        self._next = self._pool.pick(self._key, (scheduler,), *what) if self._full == 1 else None
        if self._next is not None:
            return
        if self._siblings.accepted and not self._journal.started:
            self._full, self._waiting_since = 0, None
            await self._in_time(self._siblings.wait_for_room(error.retry_after or 1.0))
            return
        left = self._time_to_wait()
        if not self._journal.num_resumes or left <= 0:
            raise error
        self._full = 0
        await asyncio.sleep(min(error.retry_after or 1.0, left))

    def _after_loss(self, scheduler: SchedulerClient, error: Unavailable) -> None:
        """Prepare the resumption in the next call. Raise after too many losses."""
        scheduler.recheck()
        self._error, self._waiting_since = error, None
        if isinstance(error, ConnectionLost):
            self._record.lost(error, alone=self._call is not None and self._call.lost_alone)
        else:
            self._refused += 1
            if self._refused > self._timeouts.max_resumes:
                raise error
        if self._journal.started or isinstance(error, ConnectionLost):
            self._journal.resume()
            logger.warning(
                "%s: lost scheduler %s after %d tokens, resuming: %s",
                self._journal.request_id,
                scheduler.address,
                len(self._journal.emitted_ids),
                error.message,
            )
