"""Any GenerateRequest is parsed or refused with the parameter's name; nothing else happens."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.errors import InvalidRequest
from surestep_proto.sampling_pb2 import SamplingParams, TokenSequence
from surestep_proto.scheduler_pb2 import GenerateRequest
from surestep_proto.worker_pb2 import Admission
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.service.requests import ended, parse_request

VOCAB = 300
UINT32 = st.integers(0, (1 << 32) - 1)
IDS = st.lists(st.integers(0, VOCAB + 5) | UINT32, max_size=8)
FLOATS = st.floats(width=32)


def mostly(likely: st.SearchStrategy[Any], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """So that whole requests are valid often enough."""
    return st.integers(0, 9).flatmap(lambda i: rare if i == 0 else likely)


VALID_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
UNIT = st.floats(0.125, 1, width=32)
SAMPLING = st.builds(
    SamplingParams,
    temperature=mostly(UNIT, FLOATS),
    top_k=UINT32,
    top_p=mostly(UNIT, FLOATS),
    min_p=mostly(UNIT, FLOATS),
    repetition_penalty=mostly(UNIT, FLOATS),
    presence_penalty=mostly(UNIT, FLOATS),
    frequency_penalty=mostly(UNIT, FLOATS),
    seed=st.integers(0, (1 << 64) - 1),
    min_tokens=UINT32,
    stop_token_ids=mostly(VALID_IDS, IDS),
    logit_bias=mostly(
        st.dictionaries(st.integers(0, VOCAB - 1), UNIT, max_size=3),
        st.dictionaries(UINT32, FLOATS, max_size=3),
    ),
    allowed_token_ids=mostly(VALID_IDS, IDS),
    bad_words=st.lists(
        st.builds(TokenSequence, token_ids=mostly(VALID_IDS.filter(bool), IDS)), max_size=2
    ),
    want_logprobs=st.booleans(),
    num_top_logprobs=mostly(st.integers(0, 20), UINT32),
    want_prompt_logprobs=st.booleans(),
    num_top_prompt_logprobs=mostly(st.integers(0, 20), UINT32),
)
REQUESTS = st.builds(
    GenerateRequest,
    request_id=mostly(st.just("a"), st.text(max_size=4)),
    prompt_ids=mostly(VALID_IDS.filter(bool), IDS),
    emitted_ids=mostly(VALID_IDS, IDS),
    max_tokens=mostly(st.integers(1, 100), UINT32),
    sampling=SAMPLING,
    priority=st.integers(-(1 << 31), (1 << 31) - 1),
    cache_owner=st.text(max_size=4),
    cache_salt=st.text(max_size=4),
    num_draft_tokens=st.none() | UINT32,
    pooling=mostly(st.just(0), st.integers(0, 5)),
)
VECTORS = st.builds(
    GenerateRequest,
    request_id=st.just("a"),
    prompt_ids=IDS,
    emitted_ids=mostly(st.just([]), IDS),
    max_tokens=mostly(st.just(0), UINT32),
    sampling=mostly(st.none(), SAMPLING),
    num_draft_tokens=mostly(st.none(), UINT32),
    pooling=mostly(st.integers(1, 3), st.integers(0, 5)),
    label_ids=st.just([]) | VALID_IDS | IDS,
)


def parsed(message: GenerateRequest) -> Request | None:
    """None when it is refused by name."""
    try:
        return parse_request(message, VOCAB)
    except InvalidRequest as error:
        if not (error.param and error.message):
            raise
        return None


@given(REQUESTS | VECTORS)
def test_parsed_or_refused_by_name(message: GenerateRequest) -> None:
    request = parsed(message)
    if request is None:
        return
    sampling = request.sampling
    assert request.id
    if request.pooling:
        assert (sampling, len(request.emitted_ids)) == (None, 0)
        assert bool(request.label_ids) == (request.pooling == 3)
        assert request.passed_bytes >= len(
            Admission(label_ids=request.label_ids).SerializeToString()
        )
        return
    assert request.max_tokens >= 1
    assert all(math.isfinite(v) for v in sampling.logit_bias.values())
    assert max([*sampling.stop_token_ids, *sampling.allowed_token_ids, 0]) < VOCAB
    assert 0 < sampling.top_p <= 1
    assert math.isfinite(sampling.temperature)
    ended(request, 1000)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_request(data: bytes) -> None:
    """What the wire format refuses never gets to us; what it takes is handled as above."""
    message = GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    parsed(message)
