"""Preparing requests without blocking the event loop: small ones on it, the rest elsewhere.

A Job says how a kind of request is drafted, and how its result crosses processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.text.pool import TextPool
from surestep_gateway.text.process_limits import NeedsProcess
from surestep_gateway.text.text_processor import TextProcessor
from surestep_gateway.text.tokenizer import Texts
from surestep_gateway.text.wire import Parts
from surestep_gateway.text.work_gate import WorkGate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft(Generic[T]):
    """The work left once the texts have been encoded."""

    texts: Texts
    finish: Callable[[Sequence[list[int]]], T]  # takes the ids of each text


Kind = Callable[[TextProcessor, bytes | bytearray, SchedulerInfo], Draft[T]]


class Job(NamedTuple, Generic[T]):
    """A kind of request."""

    name: bytes
    draft: Kind[T]
    dump: Callable[[T], Parts]
    load: Callable[[Sequence[bytes]], T]


def dump_bytes(answer: bytes) -> Parts:
    """Serialise a result that is bytes already."""
    return [answer]


def load_bytes(parts: Sequence[bytes]) -> bytes:
    """Return such a result."""
    return parts[0]


INLINE_BYTES = 64 << 10  # of a body that is prepared on the event loop: a few milliseconds
_AT_ONCE_BYTES = 4 << 10  # of one that does not even wait for its turn: about a millisecond
_THREADS = 2


class TextService:
    """Prepares requests of one model. Needs a running event loop."""

    def __init__(self, processor: TextProcessor, pool: TextPool) -> None:
        """`pool` is shared with other models, and must be running."""
        self._processor = processor
        self._pool = pool
        self._turn = asyncio.Lock()
        self._gate = WorkGate(_THREADS, large=INLINE_BYTES)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Begin no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def at_once(self, job: Job[T], raw: bytearray, info: SchedulerInfo) -> T | None:
        """Prepare a small body; return None where `prepare` is needed. Raise SurestepError."""
        if len(raw) > _AT_ONCE_BYTES:
            return None
        try:
            draft = job.draft(self._processor, raw, info)
        except NeedsProcess:
            return None
        return draft.finish(self._processor.tokenizer.encode(draft.texts))

    async def prepare(
        self, job: Job[T], raw: bytearray, info: SchedulerInfo, caller: str = ""
    ) -> T:
        """Prepare a body for a caller, who never holds all text processes. Raise SurestepError.

        If cancelled while it waits for its turn, no work begins.
        """
        if len(raw) <= INLINE_BYTES:
            try:
                return await self._inline(job, raw, info)
            except NeedsProcess:
                pass
        facts = info.SerializeToString()
        return job.load(await self._pool.ask(self._processor, job.name, facts, raw, caller))

    async def ask(self, job: Job[T], raw: bytearray, caller: str) -> T:
        """Run a job that needs no facts of the model in a text process. Raise SurestepError."""
        return job.load(await self._pool.ask(self._processor, job.name, b"", raw, caller))

    async def _inline(self, job: Job[T], raw: bytearray, info: SchedulerInfo) -> T:
        async with self._turn:
            try:
                draft = job.draft(self._processor, raw, info)
            finally:
                await asyncio.sleep(0)  # the next task runs in the next iteration
        return draft.finish(await self._encode(draft.texts))

    async def _encode(self, texts: Texts) -> Sequence[list[int]]:
        """Encode in a thread. Work that has begun continues when its caller is cancelled."""
        size = texts.num_chars
        await self._gate.enter(size)
        loop = asyncio.get_running_loop()
        encoding = loop.run_in_executor(self._threads, self._processor.tokenizer.encode, texts)
        encoding.add_done_callback(lambda _: self._gate.leave(size))
        return await asyncio.shield(encoding)
