"""Ranges of sampling parameters, checked by the scheduler and once more by every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

from surestep_proto.engine_pb2 import SamplingParams

from .errors import InvalidRequest

_MAX_LOGPROBS = 128


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest naming the parameter that is out of range."""
    _check_numbers(sampling)
    _check_ids(sampling, vocab_size)


def _check_numbers(sampling: SamplingParams) -> None:
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


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
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
