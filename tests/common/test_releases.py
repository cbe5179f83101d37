"""What a peer of another release says, and this one does not know."""

from __future__ import annotations

import pytest
from surestep_common.errors import Unimplemented
from surestep_common.releases import name_of, refuse_unknown
from surestep_proto import sampling_pb2, worker_pb2
from surestep_proto.scheduler_pb2 import EngineState, GenerateRequest

NEW = b"\xa2\x38\x03new"  # field 900


def with_new_fields() -> GenerateRequest:
    """Beside the others, in a message, and in one of a list."""
    inner = sampling_pb2.TokenSequence(token_ids=[1])
    inner.MergeFromString(NEW)
    sampling = sampling_pb2.SamplingParams(bad_words=[inner], logit_bias={3: 1.0})
    sampling.MergeFromString(NEW)
    request = GenerateRequest(prompt_ids=[1, 2], sampling=sampling)
    request.MergeFromString(NEW)
    return request


def test_fields_are_refused_wherever_they_are() -> None:
    names = "field 900, sampling.field 900, sampling.bad_words.field 900$"
    with pytest.raises(Unimplemented, match=f"GenerateRequest: .*know {names}"):
        refuse_unknown(with_new_fields())
    plan = worker_pb2.StepPlan(admissions=[{}])
    plan.admissions[0].sampling.MergeFromString(NEW)
    with pytest.raises(Unimplemented, match=r"know admissions\.sampling\.field 900"):
        refuse_unknown(plan)


def test_what_is_known_is_not() -> None:
    request = with_new_fields()
    request.DiscardUnknownFields()
    refuse_unknown(request)


def test_values_without_a_name_are_numbers() -> None:
    assert [name_of(EngineState, value) for value in (2, 99)] == ["SERVING", "99"]
