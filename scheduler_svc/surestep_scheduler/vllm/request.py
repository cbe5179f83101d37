"""Requests of vllm.grpc.engine as our own, and what of them is refused or without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surestep_common.errors import (
    InvalidRequest,
    MissingParameter,
    RequestTooLarge,
    UnsupportedParameter,
)
from surestep_common.releases import unknown_fields
from surestep_common.request_params import MAX_LOGPROBS, check_entries, sibling_seed
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest
from surestep_proto.vllm_engine_pb2 import GenerateRequest as TheirRequest
from surestep_proto.vllm_engine_pb2 import SamplingParams as TheirParams

from surestep_scheduler.core.limits import Limits

from .constraints import grammar_of

MAX_N = 128  # sequences of a request
MAX_HELD_LOGPROBS = 1 << 22  # of a request that does not stream: some 50 MB
NAMESPACE = "vllm/"  # their ids stand apart from those of other clients

_REFUSED = {
    "text": "no text is known here: send tokenized.input_ids",
    "kv_transfer_params": "the KV cache of another server is not taken over",
    "kv_transfer_params_json": "the KV cache of another server is not taken over",
    "mm_inputs": "images and videos are not served",
    "extra_mm_inputs": "images and videos are not served",
    "media_refs": "images and videos are not served",
}
# What only a program that turns tokens into text can heed, by the value that asks for nothing.
_FOR_TEXT = ("stop", "include_stop_str_in_output")


def choices(request: TheirRequest, limits: Limits) -> Iterator[GenerateRequest]:
    """Yield one request of ours for each of the sequences; each copies the prompt when it is made.

    Raises InvalidRequest or RequestTooLarge naming the field for what is not served, at once.
    """
    _check_served(request)
    ids = _prompt_ids(request, limits)
    params, count = request.sampling_params, _count(request.sampling_params)
    sampling = _sampling(params)
    check_entries(sampling, count)
    if sampling.want_logprobs and not request.stream:
        _check_held(params, count, limits.max_request_len - len(ids))
    return (_choice(request, ids, sampling, index) for index in range(count))


def request_id(their_id: str, index: int) -> str:
    """Return the id of one sequence among all requests of the scheduler."""
    return f"{NAMESPACE}{index}/{their_id}"


def without_effect(request: TheirRequest) -> list[str]:
    """Return fields that are set and change nothing: for text, and of later versions.

    Of these the number is known, and nothing else; to refuse them would be to refuse every request
    of a sender that is a version ahead.
    """
    params = request.sampling_params
    return [
        *(name for name in _FOR_TEXT if getattr(params, name)),
        *unknown_fields(request),
    ]


def _check_served(request: TheirRequest) -> None:
    if not request.request_id:
        raise InvalidRequest("a request needs an id", param="request_id")
    given = {field.name for field, _ in request.ListFields()}
    for name, reason in _REFUSED.items():
        if name in given:
            raise UnsupportedParameter(f"{name}: {reason}", param=name)
    if request.data_parallel_rank:
        raise InvalidRequest(
            f"data_parallel_rank={request.data_parallel_rank}: there is rank 0 alone",
            param="data_parallel_rank",
        )


def _prompt_ids(request: TheirRequest, limits: Limits) -> Sequence[int]:
    """Return the prompt, cut as asked."""
    ids: Sequence[int] = request.tokenized.input_ids
    if not ids:
        raise MissingParameter("tokenized.input_ids: the prompt has no tokens", param="input_ids")
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        keep = request.sampling_params.truncate_prompt_tokens
        if keep == 0 or not -1 <= keep <= limits.max_request_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens={keep} is neither -1 nor 1 to {limits.max_request_len}",
                param="truncate_prompt_tokens",
            )
        ids = ids[-(limits.max_request_len - 1 if keep < 0 else keep) :]
    limits.check_len(len(ids), 0)
    return ids


def _count(params: TheirParams) -> int:
    if params.n > MAX_N:
        raise InvalidRequest(f"n must be at most {MAX_N}, got {params.n}", param="n")
    return params.n or 1


def _sampling(params: TheirParams) -> SamplingParams:
    """Translate all parameters but the seed."""
    if any(token_id < 0 for token_id in params.logit_bias):
        raise InvalidRequest("logit_bias: a token id is negative", param="logit_bias")
    logprobs = _alternatives(params, "logprobs")
    prompt_logprobs = _alternatives(params, "prompt_logprobs")
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        want_logprobs=logprobs is not None,
        num_top_logprobs=logprobs or 0,
        want_prompt_logprobs=prompt_logprobs is not None,
        num_top_prompt_logprobs=prompt_logprobs or 0,
        grammar=grammar_of(params),
    )


def _alternatives(params: TheirParams, name: str) -> int | None:
    if not params.HasField(name):
        return None
    count = int(getattr(params, name))
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be 0 to {MAX_LOGPROBS}, got {count}", param=name)
    return count


def _check_held(params: TheirParams, num_sequences: int, room: int) -> None:
    """Raise RequestTooLarge for an answer in one piece that would be too large to hold and send."""
    num_tokens = min(params.max_tokens, room) if params.HasField("max_tokens") else room
    count = num_sequences * num_tokens * (1 + params.logprobs)
    if count > MAX_HELD_LOGPROBS:
        raise RequestTooLarge(
            f"up to {count} log-probabilities are more than {MAX_HELD_LOGPROBS} for an answer in "
            "one piece: ask for a stream, or for fewer tokens",
            param="logprobs",
        )


def _choice(
    request: TheirRequest, ids: Sequence[int], sampling: SamplingParams, index: int
) -> GenerateRequest:
    params = request.sampling_params
    choice = GenerateRequest(
        request_id=request_id(request.request_id, index),
        prompt_ids=ids,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        sampling=sampling,
        ignore_eos=params.ignore_eos,
    )
    if params.HasField("seed"):
        choice.sampling.seed = sibling_seed(params.seed, index)
    return choice
