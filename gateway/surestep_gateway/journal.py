"""The journal of an open request, and going on from it when the scheduler is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from surestep_common.errors import (
    ConnectionLost,
    DeadlineExceeded,
    QueueFull,
    SurestepError,
    Unavailable,
)
from surestep_common.rpc import translate_errors
from surestep_proto.engine_pb2 import SamplingParams
from surestep_proto.generate_pb2 import GenerateChunk, GenerateRequest

from .link import Call, SchedulerLink

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Journal:
    """Everything needed to go on with one sequence elsewhere. `emitted_ids` only grows."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    num_draft_tokens: int | None = None
    emitted_ids: list[int] = field(default_factory=list)
    started: bool = False  # a scheduler has run this request
    num_resumes: int = 0

    def request(self) -> GenerateRequest:
        """The call that starts the sequence, or goes on with it."""
        suffix = f".{self.num_resumes}" if self.num_resumes else ""
        request = GenerateRequest(
            request_id=self.request_id + suffix,
            prompt_ids=self.prompt_ids,
            emitted_ids=self.emitted_ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            priority=self.priority,
            cache_salt=self.cache_salt,
            num_draft_tokens=self.num_draft_tokens,
        )
        if self.started:  # these came with the first chunk
            request.sampling.want_prompt_logprobs = False
        return request

    def record(self, chunk: GenerateChunk) -> None:
        """Note what a chunk delivers."""
        self.started = True
        self.emitted_ids.extend(chunk.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what, in seconds."""

    first_token_s: float
    inter_token_s: float
    resume_s: float
    max_resumes: int


class OpenRequest:
    """One sequence at the scheduler, across as many calls as it takes."""

    def __init__(
        self, link: SchedulerLink, journal: Journal, patience: Patience, deadline: float
    ) -> None:
        """`deadline` of the whole request is in seconds of the event loop's clock."""
        self._link = link
        self._journal = journal
        self._patience = patience
        self._deadline = deadline
        self._resume_by = 0.0  # deadline of the interruption that is going on; 0 = none
        self._clock = asyncio.get_running_loop().time

    async def chunks(self) -> AsyncGenerator[GenerateChunk, None]:
        """Chunks until the one with the finish reason; tokens never repeat and never go missing.

        Raises the scheduler's refusal, DeadlineExceeded, or Unavailable when resuming failed.
        Closing the generator aborts the request.
        """
        while True:
            known = self._link.connected
            try:
                async with contextlib.aclosing(self._attempt()) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except (Unavailable, QueueFull) as error:
                if not self._may_resume(error, known):
                    raise
                await self._wait_to_resume(error)

    async def _attempt(self) -> AsyncGenerator[GenerateChunk, None]:
        call = self._link.generate(self._journal.request(), self._remaining())
        token_by = self._clock() + self._patience.first_token_s
        try:
            while True:
                chunk = await self._read(call, token_by)
                self._journal.record(chunk)
                if chunk.token_ids:
                    self._resume_by = 0.0
                    token_by = self._clock() + self._patience.inter_token_s
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            call.cancel()

    async def _read(self, call: Call, token_by: float) -> GenerateChunk:
        try:
            async with asyncio.timeout_at(min(token_by, self._deadline)):
                with translate_errors():
                    chunk = await call.read()
        except TimeoutError:
            whole = token_by >= self._deadline
            what = "the request did not finish" if whole else "no token came"
            raise DeadlineExceeded(f"{what} in time") from None
        if not isinstance(chunk, GenerateChunk):  # end of the stream
            raise ConnectionLost("the scheduler ended the stream early")
        return chunk

    def _remaining(self) -> float:
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceeded("the request did not finish in time")
        return remaining

    def _may_resume(self, error: SurestepError, known: bool) -> bool:
        """Refusals of a new request stand; an accepted one goes on."""
        if isinstance(error, QueueFull):
            return self._journal.num_resumes > 0
        lost_while_waiting = isinstance(error, ConnectionLost) and known
        accepted = self._journal.started or self._journal.num_resumes > 0
        return accepted or lost_while_waiting

    async def _wait_to_resume(self, error: SurestepError) -> None:
        """Returns when the request may be submitted again; raises `error` when it must not."""
        if not self._resume_by:
            self._resume_by = self._clock() + self._patience.resume_s
        left = min(self._resume_by, self._deadline) - self._clock()
        if left <= 0:
            raise error
        if isinstance(error, QueueFull):  # everybody resumes at once
            await asyncio.sleep(min(error.retry_after or 1.0, left))
            return
        if self._journal.num_resumes >= self._patience.max_resumes:
            raise error
        self._journal.num_resumes += 1
        self._link.recheck()
        logger.warning(
            "lost the scheduler after %d tokens, resuming: %s",
            len(self._journal.emitted_ids),
            error.message,
        )
        await self._link.wait_until_serving(left)
