"""Chunks sent to readers, made from the outputs of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from surestep_proto import scheduler_pb2 as pb

from surestep_scheduler.core.sequence import Finish, Output, TokenLogprobs
from surestep_scheduler.core.sequence import Sequence as TokenSequence
from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.engine.open_requests import RequestOutputs
from surestep_scheduler.engine.wire import logprob_columns

_BATCH_BYTES = 1 << 20  # at least; log-probabilities of prompts take megabytes each

_FINISH = {Finish.STOP: pb.STOP, Finish.LENGTH: pb.LENGTH, Finish.POOLED: pb.POOLED}


def batches(ready: Iterable[RequestOutputs], engine: Engine) -> Iterator[pb.ChunkBatch]:
    """Take the outputs of requests, one chunk for all of a request's, in messages that fit."""
    batch, size = pb.ChunkBatch(), 0
    for opened in ready:
        outputs = opened.take()
        if outputs and outputs[-1].error is not None:  # which its call tells
            outputs.pop()
        if not outputs:
            continue
        batch.calls.append(opened.call)
        chunk = batch.chunks.add()
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
