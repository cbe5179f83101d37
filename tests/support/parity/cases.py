"""Requests of the parity matrix: every sampling parameter, greedy and at temperature 0.7."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.poison import CANARY
from surestep_scheduler.core.sequence import Request

SEED = 20
VOCAB, EOS = 160, 2
TOTAL_LEN = 44  # prompt + output of every request, so that one max_model_len is near for all
TEMPERATURES = (0.0, 0.7)
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}

Probe = Callable[[Request], list[int]]


def make_requests(probe: Probe) -> list[Request]:
    """One request per parameter and temperature, each with a prompt of its own.

    Stop ids and bad words are taken from what `probe` says the request would answer without them:
    a parameter that changes nothing would prove nothing.
    """
    rng = random.Random(SEED)
    requests = list[Request]()
    for temperature in TEMPERATURES:
        for name in _VARIANTS:
            first = 3 + len(requests)  # no prompt begins another
            prompt = [first, *rng.choices(range(3, VOCAB), k=rng.randrange(4, 18))]
            plain = {"temperature": temperature, "seed": rng.getrandbits(64), **NEUTRAL}
            full_name = f"{name}@{temperature}"
            changes = _VARIANTS[name](probe(make_request(full_name, prompt, plain)))
            requests.append(make_request(full_name, prompt, plain | changes))
    return requests


def make_request(name: str, prompt: list[int], params: dict[str, Any]) -> Request:
    """A request that fills TOTAL_LEN unless a stop id ends it."""
    sampling = pb.SamplingParams(**params)
    return Request(
        id=name,
        prompt_ids=prompt,
        emitted_ids=[],
        max_tokens=TOTAL_LEN - len(prompt),
        stop_ids=frozenset(sampling.stop_token_ids),
        has_grammar=sampling.HasField("grammar"),
        want_logprobs=sampling.want_logprobs,
        want_prompt_logprobs=sampling.want_prompt_logprobs,
        sampling=sampling,
    )


def canary() -> Request:
    """The scheduler's own, behind whose step workers take orders to their tiers."""
    sampling = pb.SamplingParams(top_p=1, repetition_penalty=1)
    return Request(id=CANARY, prompt_ids=[0], emitted_ids=[], max_tokens=1, sampling=sampling)


def strangers(count: int) -> list[Request]:
    """Neighbours with prompts longer than a step's budget and parameters of all sorts."""
    rng = random.Random(SEED + 1)
    return [
        make_request(
            f"stranger {i}",
            [1, *rng.choices(range(3, VOCAB), k=rng.randrange(26, TOTAL_LEN - 4))],
            {
                "temperature": rng.choice((0.0, 1.0)),
                "seed": rng.getrandbits(64),
                **NEUTRAL,
                "top_k": rng.choice((0, 3)),
                "frequency_penalty": rng.choice((0.0, 1.0)),
                "stop_token_ids": rng.sample(range(3, VOCAB), k=rng.randrange(9)),
            },
        )
        for i in range(count)
    ]


def _stop_at(index: int, answer: list[int]) -> int:
    """An id that the answer brings for the first time at `index` or soon after."""
    return next(x for i, x in enumerate(answer) if i >= index and x not in answer[:i])


def _words(answer: list[int]) -> list[pb.TokenSequence]:
    """A bigram and a single id of the answer: forbidding them changes it."""
    return [pb.TokenSequence(token_ids=answer[4:6]), pb.TokenSequence(token_ids=answer[9:10])]


def _always(params: dict[str, Any], answer: list[int]) -> dict[str, Any]:
    return params


_SHAPES: dict[str, Any] = {
    "top_k": 12,
    "top_p": 0.7,
    "min_p": 0.05,
    "repetition_penalty": 1.4,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.9,
}

_VARIANTS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "plain": lambda answer: {},
    **{name: partial(_always, {name: value}) for name, value in _SHAPES.items()},
    "seed": lambda answer: {"seed": 2**64 - 1},
    "logit_bias": lambda answer: {"logit_bias": {answer[3]: -40.0, 17: 6.0, 90: 3.0}},
    "min_tokens": lambda answer: {"min_tokens": 12, "stop_token_ids": [EOS, _stop_at(3, answer)]},
    "stop_token_ids": lambda answer: {"stop_token_ids": [EOS, _stop_at(8, answer)]},
    "allowed_token_ids": lambda answer: {
        "allowed_token_ids": [x for x in range(VOCAB) if x % 3 or x == answer[1]]
    },
    "bad_words": lambda answer: {"bad_words": _words(answer)},
    "logprobs": lambda answer: {"want_logprobs": True, "num_top_logprobs": 3},
    "prompt_logprobs": lambda answer: {"want_prompt_logprobs": True, "num_top_prompt_logprobs": 2},
    "everything": lambda answer: {
        **_SHAPES,
        "logit_bias": {answer[0]: -40.0, 17: 1.0},
        "min_tokens": 5,
        "stop_token_ids": [EOS, 30, 31, 32],
        "bad_words": _words(answer),
        "allowed_token_ids": [x for x in range(VOCAB) if x % 5],
        "want_logprobs": True,
        "num_top_logprobs": 2,
        "want_prompt_logprobs": True,
    },
}
