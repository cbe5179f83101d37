"""Sampling parameters of requests: ranges, defaults, and the seeds of siblings.

The scheduler checks the ranges, and every rank once more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

from surestep_proto.sampling_pb2 import SamplingDefaults, SamplingParams

from .errors import InvalidRequest
from .request_bounds import (
    LEAST_REPETITION,
    MOST_PENALTY,
    MOST_REPETITION,
    check_entries,
    check_grammar,
)

MAX_LOGPROBS = 128  # alternatives per token
_MASK64 = (1 << 64) - 1
_SINGLE = struct.Struct("f")
_GOLDEN = 0x9E3779B97F4A7C15
# Fields of SamplingParams that a model may have defaults for.
SHAPING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_DIGITS = 6  # that a number keeps on the wire, in single precision


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest or RequestTooLarge naming the parameter that is out of range."""
    check_entries(sampling)
    _check_numbers(sampling)
    _check_ids(sampling, vocab_size)
    if sampling.HasField("grammar"):
        check_grammar(sampling.grammar)
        check_vocab("grammar", sampling.grammar.begins_after, vocab_size)


def shapes_logits(sampling: SamplingParams) -> bool:
    """Return whether the request has the model's logits changed before a token is chosen."""
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words
        or (sampling.min_tokens and sampling.stop_token_ids)
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.HasField("grammar")
    )


def _check_numbers(sampling: SamplingParams) -> None:
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", LEAST_REPETITION, MOST_REPETITION),
        ("presence_penalty", -MOST_PENALTY, MOST_PENALTY),
        ("frequency_penalty", -MOST_PENALTY, MOST_PENALTY),
        ("num_top_logprobs", 0, MAX_LOGPROBS),
        ("num_top_prompt_logprobs", 0, MAX_LOGPROBS),
    ):
        value = getattr(sampling, name)
        if not (_single(low) <= value <= high and math.isfinite(value)):
            raise InvalidRequest(f"{name} is {value:g}, not in [{low:g}, {high:g}]", param=name)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0; 1 turns it off", param="top_p")
    if any(not math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequest("logit_bias holds a value that is not finite", param="logit_bias")


def _single(bound: float) -> float:
    """Return a bound as the wire carries it: 0.01 in single precision is a little less."""
    (single,) = _SINGLE.unpack(_SINGLE.pack(bound))
    return float(single)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    check_vocab("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_vocab("logit_bias", list(sampling.logit_bias), vocab_size)
    check_vocab("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    if not all(word.token_ids for word in sampling.bad_words):
        raise InvalidRequest("bad_words holds an empty sequence", param="bad_words")
    ids = chain.from_iterable(word.token_ids for word in sampling.bad_words)
    check_vocab("bad_words", list(ids), vocab_size)


def check_vocab(param: str, ids: Sequence[int] | Any, vocab_size: int) -> None:
    """Raise InvalidRequest when one of the ids is outside the vocabulary.

    `ids` are whatever numpy makes an array of: a message's column without a look at each.
    """
    import numpy as np  # which a launcher does not wait for

    highest = int(np.asarray(ids).max(initial=0))
    if highest >= vocab_size:
        raise InvalidRequest(f"{param}: token id {highest} is not in the vocabulary", param=param)


def neutral() -> SamplingDefaults:
    """Return values that leave the model's own distribution alone."""
    return SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Return what people and clients are shown; lengths that are not set are left out."""
    values = {name: round(getattr(defaults, name), _DIGITS) for name in SHAPING}
    lengths = {name: getattr(defaults, name) for name in ("max_tokens", "max_tokens_limit")}
    return values | {name: length for name, length in lengths.items() if length}


def sibling_seed(seed: int, sibling: int) -> int:
    """Return the seed of sequence `sibling` of a request: its own stream of noise.

    Sibling 0 has the request's seed, sibling i the i-th output of splitmix64 (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014) started there.
    """
    if sibling == 0:
        return seed & _MASK64
    z = (seed + sibling * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
