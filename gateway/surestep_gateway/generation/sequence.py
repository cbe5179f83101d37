"""Sequence of a request: from chunks of token ids to deltas of text.

With its log-probabilities by position, its accepted drafts and its token counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest, Unimplemented
from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_proto.scheduler_pb2 import ABORTED, LENGTH, STOP, GenerateChunk

from surestep_gateway.generation.detokenize import REPEATED, TextAssembler
from surestep_gateway.generation.schema_check import SchemaCheck, Violations
from surestep_gateway.observability.metrics import SequenceEnd, SequenceTimer
from surestep_gateway.parsers import Event, content_of
from surestep_gateway.request.protocol import CUT, GenerationBody
from surestep_gateway.schedulers.journal import Journal, ResumableStream

_FLOOR = -9999.0  # JSON has no infinity
_SLICE_ROWS = 256


class TokenLogprob(NamedTuple):
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


class Position(NamedTuple):
    """Position of the output or of the prompt."""

    chosen: TokenLogprob
    rank: int  # 1 = most likely
    top: list[TokenLogprob]  # most likely first


def positions(columns: LogprobColumns) -> list[Position]:
    """Return the rows of the columns."""
    return [position for part in position_slices(columns) for position in part]


def position_slices(columns: LogprobColumns) -> Iterator[list[Position]]:
    """Yield the rows in lists of a bounded size: the columns of a long prompt are large."""
    at = 0
    for first in range(0, len(columns.token_id), _SLICE_ROWS):
        rows = slice(first, first + _SLICE_ROWS)
        part = []
        for token_id, logprob, rank, num_top in zip(
            columns.token_id[rows],
            columns.logprob[rows],
            columns.rank[rows],
            columns.num_top[rows],
            strict=True,
        ):
            ids = columns.top_token_ids[at : at + num_top]
            values = columns.top_logprobs[at : at + num_top]
            top = [TokenLogprob(i, max(v, _FLOOR)) for i, v in zip(ids, values, strict=True)]
            part.append(Position(TokenLogprob(token_id, max(logprob, _FLOOR)), rank, top))
            at += num_top
        yield part


class Run(NamedTuple):
    """Neighbouring tokens of a chunk that become one delta."""

    first: int
    end: int
    drafted: bool | None  # None: not requested
    is_last: bool  # the chunk ends with it


def wants_drafted(body: GenerationBody) -> bool:
    """Return whether the request asks for it."""
    return body.speculative is not None and bool(body.speculative.return_drafted)


def emitted_before(body: GenerationBody) -> Sequence[int]:
    """Return the tokens of the only answer that another server has delivered."""
    return getattr(body, "emitted_ids", None) or ()


def runs(chunk: GenerateChunk) -> Iterable[Run]:
    """Return the whole chunk, or its runs of tokens that are all drafted or all not."""
    if not chunk.drafted:
        return (Run(0, len(chunk.token_ids), None, True),)
    return _alike(chunk.drafted)


def _alike(drafted: Sequence[bool]) -> Iterator[Run]:
    end = 0
    for same, group in groupby(drafted):
        first, end = end, end + sum(1 for _ in group)
        yield Run(first, end, same, end == len(drafted))


@dataclass(slots=True)
class TokenUsage:
    """Counts of all sequences of one request. A prompt counts once, however many choices it has."""

    prompt: int
    cached: int = 0  # of the prompt, served from the prefix cache
    output: int = 0
    reasoning: int | None = None  # of the output; None where reasoning is not set apart

    def shown(self) -> dict[str, Any]:
        """Return the API's `usage` object."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return counts


class Delta(NamedTuple):
    """Addition of a chunk to the output of a sequence."""

    events: Sequence[Event]  # none while a character or a possible marker is unfinished
    token_ids: Sequence[int]
    logprobs: list[Position] | None  # parallel to token_ids
    finish_reason: str | None  # set in the last delta
    stop_reason: str | int | None  # the stop string, the stop token the client asked for, or why
    drafted: bool | None = None  # all of the tokens were, or none; None: not requested
    violations: Violations | None = None  # in the last delta, where answers are checked

    @property
    def each_drafted(self) -> list[bool]:
        """`drafted` of each token; empty where the request did not ask for it."""
        return [] if self.drafted is None else [self.drafted] * len(self.token_ids)

    @property
    def text(self) -> str:
        """The content among the events."""
        return content_of(self.events)


class OutputSequence:
    """The state of one output sequence. `index` is its index among the choices."""

    def __init__(
        self,
        index: int,
        journal: Journal,
        source: ResumableStream,
        assembler: TextAssembler,
        eos_ids: Sequence[int],
        timer: SequenceTimer,
        usage: TokenUsage,
        *,
        counts_prompt: bool,
        prompt_only: bool = False,
        check: SchemaCheck | None = None,
    ) -> None:
        """`usage` is the request's; of the siblings with one prompt, only one counts it.

        With `prompt_only`, the one token that the scheduler is asked for, so that it computes the
        prompt, is not part of the response.
        """
        self.index = index
        self.journal = journal
        self.prompt_logprobs: LogprobColumns | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.num_preemptions = 0
        self.finish_reason: str | None = None  # the scheduler's, as the metrics count it
        self._started = False
        self._source = source
        self._assembler = assembler
        self._eos_ids = frozenset(eos_ids)
        self.timer = timer
        self._usage = usage
        self._counts_prompt = counts_prompt
        self._prompt_only = prompt_only
        self._check = check
        if assembler.num_reasoning_tokens is not None:
            usage.reasoning = 0

    def end(self, otherwise: str) -> SequenceEnd:
        """Return how the sequence ended; `otherwise` is the reason if it did not finish."""
        return SequenceEnd(
            reason=self.finish_reason or otherwise,
            prompt_tokens=len(self.journal.prompt_ids),
            cached_tokens=self.num_cached_tokens,
            tokens=self.num_tokens,
            max_tokens=self.journal.most_tokens,
            preemptions=self.num_preemptions,
        )

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens so far; None where reasoning is not parsed."""
        return self._assembler.num_reasoning_tokens

    async def go_on_behind(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that another server has delivered. Raise InvalidRequest if they end it."""
        ended = token_ids[-1] in self.journal.sampling.stop_token_ids
        ended |= token_ids[-1] in self._eos_ids and not self.journal.ignore_eos
        for first in range(0, len(token_ids), _SLICE_ROWS):
            part = token_ids[first : first + _SLICE_ROWS]
            piece = self._assembler.push(part, ended=False, stop_token=False)
            if ended or piece.stop is not None or piece.repeats:
                raise InvalidRequest(
                    "the answer had ended already within 'emitted_ids'", param="emitted_ids"
                )
            if self._check is not None:
                self._check.add(piece.events)
            await asyncio.sleep(0)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield deltas until the one with the finish reason; closing the generator aborts."""
        async with contextlib.aclosing(self._source.chunks()) as chunks:
            async for chunk in chunks:
                if chunk.HasField("start"):
                    self._note_start(chunk)
                if chunk.finish_reason:
                    self.num_preemptions = chunk.end.num_preemptions
                elif not chunk.token_ids:
                    continue
                self.timer.tokens()
                if self._prompt_only:
                    self.finish_reason = "length"
                    yield Delta([], [], None, self.finish_reason, None)
                    return
                logprobs = self._logprobs(chunk)
                for run in runs(chunk):
                    delta = self._delta(chunk, run, logprobs)
                    if self._check is not None:
                        delta = await self._checked(delta, self._check)
                    yield delta
                    if delta.finish_reason is not None:
                        return

    async def _checked(self, delta: Delta, check: SchemaCheck) -> Delta:
        """Return the delta; the last one with the violations in an output that is not cut."""
        check.add(delta.events)
        if delta.finish_reason in (None, *CUT):
            return delta
        return delta._replace(violations=await check.violations())

    def _note_start(self, chunk: GenerateChunk) -> None:
        if not self._started:  # what later calls find in a cache is no saving of the client's
            self._started = True
            self.num_cached_tokens = chunk.start.num_cached_tokens
            self._usage.cached += self.num_cached_tokens if self._counts_prompt else 0
            self.timer.started(chunk.start.queue_s)
        if self.prompt_logprobs is None and self.journal.sampling.want_prompt_logprobs:
            self.prompt_logprobs = chunk.prompt_logprobs

    def _logprobs(self, chunk: GenerateChunk) -> list[Position] | None:
        """Return the positions of a chunk; None where log-probabilities are not requested."""
        return positions(chunk.logprobs) if self.journal.sampling.want_logprobs else None

    def _delta(self, chunk: GenerateChunk, run: Run, logprobs: list[Position] | None) -> Delta:
        reason = chunk.finish_reason if run.is_last else None
        token_ids = chunk.token_ids[run.first : run.end]
        reasoning = self.num_reasoning_tokens
        piece = self._assembler.push(token_ids, ended=bool(reason), stop_token=reason == STOP)
        self.num_tokens += len(piece.token_ids)
        self._usage.output += len(piece.token_ids)
        if self._usage.reasoning is not None:
            self._usage.reasoning += (self.num_reasoning_tokens or 0) - (reasoning or 0)
        if logprobs is not None:
            logprobs = logprobs[run.first : run.first + len(piece.token_ids)]
        stop_reason: str | int | None = piece.stop
        if piece.stop is not None:
            self.finish_reason = "stop"
        elif piece.repeats:
            self.finish_reason, stop_reason = "repetition", REPEATED
        elif reason == STOP:
            self.finish_reason = "stop"
            last = self.journal.emitted_ids[-1]
            stop_reason = None if last in self._eos_ids else last
        elif reason == LENGTH:
            self.finish_reason = "length"
        elif reason == ABORTED:
            self.finish_reason = "abort"
        elif reason:
            raise Unimplemented(f"this release does not know the finish reason {reason}")
        shown = self.finish_reason
        if shown == "stop" and self._assembler.called:
            shown = "tool_calls"
        return Delta(piece.events, piece.token_ids, logprobs, shown, stop_reason, run.drafted)


Emit = Callable[[OutputSequence, Delta], Awaitable[None]]


async def run_sequences(sequences: Sequence[OutputSequence], emit: Emit, max_open: int) -> None:
    """Run all sequences, at most `max_open` at once, and emit every delta as it comes.

    A refusal of any sequence normally arrives before the first token of any other, because the
    scheduler refuses at once; it ends them all and is raised.
    """
    if len(sequences) == 1:
        await _run_one(sequences[0], emit)
        return
    slots = asyncio.Semaphore(max_open)

    async def run(sequence: OutputSequence) -> None:
        async with slots:
            await _run_one(sequence, emit)

    try:
        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                group.create_task(run(sequence))
                await asyncio.sleep(0)  # each sends its prompt in a turn of its own
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _run_one(sequence: OutputSequence, emit: Emit) -> None:
    async with contextlib.aclosing(sequence.deltas()) as deltas:
        async for delta in deltas:
            await emit(sequence, delta)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of an exception group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
