"""Our chunks as the responses of vllm.grpc.engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from surestep_proto import scheduler_pb2
from surestep_proto import vllm_engine_pb2 as pb
from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_proto.scheduler_pb2 import GenerateChunk

_ABORT = "abort"
_FINISH = {
    scheduler_pb2.STOP: "stop",
    scheduler_pb2.LENGTH: "length",
    scheduler_pb2.ABORTED: _ABORT,
}


class ChoiceResponses:
    """The responses of one sequence of a request, and what has come of it."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        index: int,
        prompt_ids: Sequence[int],
        eos_ids: Iterable[int],
    ) -> None:
        """`request` as it came, its prompt as it is computed, and what ends a sequence anyway."""
        self._stream = request.stream
        self._first_id = prompt_ids[0]
        params = request.sampling_params
        known = () if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids).difference(known)
        self._told = pb.GenerateComplete(index=index, prompt_tokens=len(prompt_ids))
        self.ended = False

    def add(self, chunk: GenerateChunk) -> Iterator[pb.GenerateResponse]:
        """Return the responses that follow from a chunk."""
        told = self._told
        told.output_ids.extend(chunk.token_ids)
        told.completion_tokens = len(told.output_ids)
        if chunk.HasField("start"):
            told.cached_tokens = chunk.start.num_cached_tokens
        if self._stream:
            yield self._delta(chunk)
        else:
            self._add_logprobs(told, chunk)
        if chunk.HasField("end"):
            self.ended = True
            told.finish_reason = _FINISH[chunk.finish_reason]
            told.spec_draft_tokens = chunk.end.num_draft_tokens
            told.spec_accepted_tokens = chunk.end.num_accepted_tokens
            if chunk.finish_reason == scheduler_pb2.STOP and told.output_ids[-1] in self._stop_ids:
                told.matched_token_id = told.output_ids[-1]
            yield pb.GenerateResponse(complete=told)

    def abort(self) -> pb.GenerateResponse:
        """Return the response to an abort, with what has come of the sequence."""
        self.ended = True
        self._told.finish_reason = _ABORT
        return pb.GenerateResponse(complete=self._told)

    def _delta(self, chunk: GenerateChunk) -> pb.GenerateResponse:
        told = self._told
        delta = pb.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=told.prompt_tokens,
            completion_tokens=len(chunk.token_ids),
            cached_tokens=told.cached_tokens,
            index=told.index,
        )
        self._add_logprobs(delta, chunk)
        return pb.GenerateResponse(chunk=delta)

    def _add_logprobs(
        self, told: pb.GenerateStreamChunk | pb.GenerateComplete, chunk: GenerateChunk
    ) -> None:
        if chunk.HasField("logprobs"):
            _append(told.output_logprobs, chunk.logprobs)
        if chunk.HasField("prompt_logprobs"):
            _append_prompt(told.input_logprobs, chunk.prompt_logprobs, self._first_id)


def _append(told: pb.OutputLogProbs, columns: LogprobColumns) -> None:
    told.token_logprobs.extend(columns.logprob)
    told.token_ids.extend(columns.token_id)
    if columns.top_token_ids:
        told.top_logprobs.extend(_alternatives(columns))


def _append_prompt(told: pb.InputLogProbs, columns: LogprobColumns, first_id: int) -> None:
    told.token_logprobs.add()
    told.token_logprobs.extend(pb.InputTokenLogProb(value=value) for value in columns.logprob)
    told.token_ids.append(first_id)
    told.token_ids.extend(columns.token_id)
    if columns.top_token_ids:
        told.top_logprobs.add()
        told.top_logprobs.extend(_alternatives(columns))


def _alternatives(columns: LogprobColumns) -> Iterator[pb.TopLogProbs]:
    bounds = pairwise(accumulate(columns.num_top, initial=0))
    return (
        pb.TopLogProbs(values=columns.top_logprobs[a:b], token_ids=columns.top_token_ids[a:b])
        for a, b in bounds
    )
