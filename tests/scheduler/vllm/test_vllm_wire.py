"""vllm_engine.proto agrees with the table of their fields, number by number."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor
from support.clients.vllm_wire import COMMON_TABLE, METHODS, TABLE, WireField, fields
from surestep_proto import smg_common_pb2, vllm_engine_pb2

_OURS = vllm_engine_pb2.DESCRIPTOR.message_types_by_name
_COMMON = smg_common_pb2.DESCRIPTOR.message_types_by_name
_THEIRS = fields(TABLE)
# Whose content is refused or never sent, whatever it is.
_OPAQUE = {"MultimodalInputs", "MediaRef", "MediaRefs", "KvTransferParams"}
_UNSERVED = {"SubscribeKvEventsRequest", "KvEventBatch", "FlushCacheRequest", "FlushCacheResponse"}
_UNSERVED |= {"StartProfileRequest", "ProfileResponse"}
_LATER = 900


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return "LogitBiasEntry" if field.name == "logit_bias" else str(field.message_type.name)
    names = {v: k for k, v in vars(FieldDescriptor).items() if k.startswith("TYPE_")}
    return names[field.type].removeprefix("TYPE_").lower()


@pytest.mark.parametrize("name", sorted(set(_OURS.keys()) - _OPAQUE))
def test_numbers_names_and_types(name: str) -> None:
    theirs = {field.number: field for field in _THEIRS[name] if field.number < _LATER}
    ours = {
        field.number: WireField(field.number, field.name, _kind(field), field.is_repeated)
        for field in _OURS[name].fields
    }
    assert ours == {number: field for number, field in theirs.items() if number in ours}
    left_out = theirs.keys() - ours.keys()
    assert all(_is_reserved(name, number) for number in left_out), left_out


def _is_reserved(name: str, number: int) -> bool:
    message = descriptor_pb2.DescriptorProto()
    _OURS[name].CopyToProto(message)
    return any(one.start <= number < one.end for one in message.reserved_range)


@pytest.mark.parametrize("name", sorted(set(_COMMON.keys()) - _UNSERVED))
def test_shared_messages(name: str) -> None:
    ours = [WireField(f.number, f.name, _kind(f), f.is_repeated) for f in _COMMON[name].fields]
    assert ours == fields(COMMON_TABLE)[name]


def test_every_method_is_there() -> None:
    service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
    assert service.full_name == "vllm.grpc.engine.VllmEngine"
    assert {method.name for method in service.methods} == set(METHODS)


def test_presence_is_as_theirs() -> None:
    """Where a zero is told from nothing, and where it is not."""
    params = _OURS["SamplingParams"].fields
    with_presence = {field.name for field in params if field.has_presence}
    constraints = {field.name for field in params if field.containing_oneof is not None}
    assert with_presence == constraints
    assert with_presence == {
        *("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed"),
        *("truncate_prompt_tokens", "json_schema", "regex", "grammar", "structural_tag"),
        *("json_object", "choice"),
    }
