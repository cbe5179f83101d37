"""From the wire to a Request, with every range checked."""

from __future__ import annotations

import math
from collections.abc import Iterable

from surestep_common.errors import InvalidRequest
from surestep_proto import engine_pb2, generate_pb2

from .sequence import CANARY, Finish, Request

_MAX_LOGPROBS = 128


def parse_request(message: generate_pb2.GenerateRequest, vocab_size: int) -> Request:
    """The request in the core's terms. Raises InvalidRequest naming the parameter."""
    if not message.request_id:
        raise InvalidRequest("a request needs an id", param="request_id")
    if message.request_id == CANARY:
        raise InvalidRequest(f"'{CANARY}' is the scheduler's own", param="request_id")
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    sampling = message.sampling
    _check_numbers(sampling)
    _check_ids(sampling, vocab_size)
    return Request(
        id=message.request_id,
        prompt_ids=list(message.prompt_ids),
        emitted_ids=list(message.emitted_ids),
        max_tokens=message.max_tokens,
        stop_ids=frozenset(sampling.stop_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        draft_cap=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
        want_prompt_logprobs=sampling.want_prompt_logprobs,
        sampling=sampling,
    )


def ended(request: Request, max_request_len: int) -> Finish | None:
    """Why nothing is left of a resumed request whose last token was delivered, but not its end."""
    emitted = request.emitted_ids
    if emitted and emitted[-1] in request.stop_ids:
        return Finish.STOP
    total = len(request.prompt_ids) + len(emitted)
    if emitted and (len(emitted) >= request.max_tokens or total >= max_request_len):
        return Finish.LENGTH
    return None


def _check_numbers(sampling: engine_pb2.SamplingParams) -> None:
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, math.inf),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("num_top_logprobs", 0, _MAX_LOGPROBS),
        ("num_top_prompt_logprobs", 0, _MAX_LOGPROBS),
    ):
        value = getattr(sampling, name)
        if not (low <= value <= high and math.isfinite(value)):
            raise InvalidRequest(f"{name} is {value:g}, not in [{low:g}, {high:g}]", param=name)
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise InvalidRequest(f"{name} must be above 0; 1 turns it off", param=name)
    if any(not math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequest("logit_bias holds a value that is not finite", param="logit_bias")


def _check_ids(sampling: engine_pb2.SamplingParams, vocab_size: int) -> None:
    _check_vocab("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_vocab("logit_bias", sampling.logit_bias, vocab_size)
    _check_vocab("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for words in sampling.bad_words:
        _check_vocab("bad_words", words.token_ids, vocab_size)
        if not words.token_ids:
            raise InvalidRequest("bad_words holds an empty sequence", param="bad_words")


def _check_vocab(name: str, ids: Iterable[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise InvalidRequest(f"{name}: token id {highest} is not in the vocabulary", param=name)
