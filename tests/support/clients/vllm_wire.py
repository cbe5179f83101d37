"""A client of vllm.grpc.engine that is generated from the numbers of its fields, and from nothing of ours.

The table is the wire of smg-grpc-proto 0.4.28. Messages are built in a descriptor pool of their own, with
presence for every field, so that a test can send a zero and leave a field out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE, COMMON = "vllm.grpc.engine", "smg.grpc.common"
SERVICE = f"{PACKAGE}.VllmEngine"

# One message per block: name, then "number name type"; "*" behind the type: repeated.
TABLE = """
SamplingParams
1 temperature float; 2 top_p float; 3 top_k uint32; 4 min_p float; 5 frequency_penalty float
6 presence_penalty float; 7 repetition_penalty float; 8 max_tokens uint32; 9 min_tokens uint32
10 stop string*; 11 stop_token_ids uint32*; 12 skip_special_tokens bool
13 spaces_between_special_tokens bool; 14 ignore_eos bool; 15 n uint32; 16 json_schema string
17 regex string; 18 grammar string; 19 structural_tag string; 20 json_object bool
21 choice ChoiceConstraint; 22 logprobs int32; 23 prompt_logprobs int32; 24 seed int32
25 include_stop_str_in_output bool; 26 logit_bias LogitBiasEntry*; 27 truncate_prompt_tokens int32
28 grammar_from_first_token bool; 900 of_a_later_version uint32

LogitBiasEntry
1 key int32; 2 value float

ChoiceConstraint
1 choices string*

TokenizedInput
1 original_text string; 2 input_ids uint32*

MultimodalInputs
4 im_token_id uint32; 6 mm_hashes string*

MediaRef
1 modality int32; 2 url string

MediaRefs
1 items MediaRef*

KvTransferParams
1 remote_host string; 2 remote_port uint32

GenerateRequest
1 request_id string; 2 tokenized TokenizedInput; 3 text string; 4 sampling_params SamplingParams
5 stream bool; 6 kv_transfer_params KvTransferParams; 7 mm_inputs MultimodalInputs
8 kv_transfer_params_json string; 9 data_parallel_rank int32; 10 media_refs MediaRefs
11 extra_mm_inputs MultimodalInputs*; 900 of_a_later_version uint32

OutputLogProbs
1 token_logprobs float*; 2 token_ids uint32*; 3 top_logprobs TopLogProbs*

InputLogProbs
1 token_logprobs InputTokenLogProb*; 2 token_ids uint32*; 3 top_logprobs TopLogProbs*

InputTokenLogProb
1 value float

TopLogProbs
1 values float*; 2 token_ids uint32*

GenerateResponse
1 chunk GenerateStreamChunk; 2 complete GenerateComplete

GenerateStreamChunk
1 token_ids uint32*; 2 prompt_tokens uint32; 3 completion_tokens uint32; 4 cached_tokens uint32
5 output_logprobs OutputLogProbs; 6 input_logprobs InputLogProbs; 7 index uint32

GenerateComplete
1 output_ids uint32*; 2 finish_reason string; 3 prompt_tokens uint32; 4 completion_tokens uint32
5 cached_tokens uint32; 6 output_logprobs OutputLogProbs; 7 input_logprobs InputLogProbs
8 index uint32; 9 kv_transfer_params KvTransferParams; 10 matched_token_id uint32
11 matched_stop_str string; 12 kv_transfer_params_json string; 13 spec_accepted_tokens uint32
14 spec_draft_tokens uint32

EmbedRequest
1 request_id string; 2 tokenized TokenizedInput

EmbedResponse
1 embedding float*; 2 prompt_tokens uint32; 3 embedding_dim uint32

HealthCheckRequest

HealthCheckResponse
1 healthy bool; 2 message string

AbortRequest
1 request_ids string*

AbortResponse

GetModelInfoRequest

GetModelInfoResponse
1 model_path string; 2 is_generation bool; 3 max_context_length uint32; 4 vocab_size uint32
5 supports_vision bool; 6 served_model_name string; 7 tokenizer_path string; 8 model_type string
9 architectures string*; 10 eos_token_ids int32*; 11 pad_token_id int32; 12 bos_token_id int32
13 max_req_input_len int32; 14 default_sampling_params_json string

GetServerInfoRequest

GetServerInfoResponse
1 active_requests uint32; 2 is_paused bool; 3 last_receive_timestamp double; 4 uptime_seconds double
5 server_type string; 6 kv_connector string; 7 kv_role string; 8 kv_engine_id string
9 data_parallel_size int32; 10 shm_namespace_id string; 11 kv_cache_dtype string; 12 block_size int32
13 attention_backend string; 14 model_dtype string; 15 pairing_protocol string; 16 mm_processor string
17 mm_media_ref_schemes string; 18 mm_processor_source string; 19 mm_device_do_normalize bool
20 max_num_seqs int32; 21 mm_item_limits string; 22 multimodal_encoder_dtype string
23 engine_reasoning_parser string; 24 constrained_decoding_start string; 25 mm_encoder_budget int32

GetLoadsRequest
1 dp_rank int32; 2 include string*

GetLoadsResponse
1 timestamp string; 2 version string; 3 dp_rank_count int32; 4 loads SchedulerLoad*

SchedulerLoad
1 dp_rank int32; 2 num_running_reqs int32; 3 num_waiting_reqs int32; 4 num_total_reqs int32
5 num_used_tokens int32; 6 max_total_num_tokens int32; 7 token_usage double; 8 gen_throughput double
9 cache_hit_rate double; 10 utilization double; 11 max_running_requests int32
12 num_waiting_uncached_tokens int32
"""
COMMON_TABLE = """
GetTokenizerRequest

GetTokenizerChunk
1 data bytes; 2 sha256 string

SubscribeKvEventsRequest
1 start_sequence_number uint64; 2 load_records_before_first_batch bool

KvEventBatch
1 sequence_number uint64; 2 timestamp double

FlushCacheRequest
1 timeout_s float

FlushCacheResponse
1 success bool; 2 message string

StartProfileRequest
1 output_dir string

StopProfileRequest

ProfileResponse
1 success bool; 2 message string
"""
_METHODS = {
    "Generate": ("GenerateRequest", "GenerateResponse"),
    "Embed": ("EmbedRequest", "EmbedResponse"),
    "HealthCheck": ("HealthCheckRequest", "HealthCheckResponse"),
    "Abort": ("AbortRequest", "AbortResponse"),
    "GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse"),
    "GetServerInfo": ("GetServerInfoRequest", "GetServerInfoResponse"),
    "GetLoads": ("GetLoadsRequest", "GetLoadsResponse"),
    "GetTokenizer": ("GetTokenizerRequest", "GetTokenizerChunk"),
    "SubscribeKvEvents": ("SubscribeKvEventsRequest", "KvEventBatch"),
    "FlushCache": ("FlushCacheRequest", "FlushCacheResponse"),
    "StartProfile": ("StartProfileRequest", "ProfileResponse"),
    "StopProfile": ("StopProfileRequest", "ProfileResponse"),
}
METHODS = tuple(_METHODS)
_STREAMS = {"Generate", "GetTokenizer", "SubscribeKvEvents"}
_Field = descriptor_pb2.FieldDescriptorProto


class WireField(NamedTuple):
    """A line of the table."""

    number: int
    name: str
    kind: str
    repeated: bool


def fields(table: str) -> dict[str, list[WireField]]:
    """By message."""
    found = {}
    for block in table.strip().split("\n\n"):
        name, *lines = block.split("\n")
        parts = [part.split() for line in lines for part in line.split(";")]
        found[name] = [WireField(int(a), b, c.rstrip("*"), c[-1] == "*") for a, b, c in parts]
    return found


def _file(package: str, table: str) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.wire", package=package)
    for name, of_message in fields(table).items():
        message = file.message_type.add(name=name)
        for field in of_message:
            label = _Field.LABEL_REPEATED if field.repeated else _Field.LABEL_OPTIONAL
            added = message.field.add(name=field.name, number=field.number, label=label)
            if field.kind[0].isupper():
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{package}.{field.kind}"
            else:
                added.type = _Field.Type.Value(f"TYPE_{field.kind.upper()}")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file(PACKAGE, TABLE))
_pool.Add(_file(COMMON, COMMON_TABLE))


def new(name: str, **values: Any) -> Any:
    """A message of theirs."""
    package = COMMON if name in fields(COMMON_TABLE) else PACKAGE
    descriptor = _pool.FindMessageTypeByName(f"{package}.{name}")
    return message_factory.GetMessageClass(descriptor)(**values)


class WireAnswer(NamedTuple):
    """Responses to a Generate."""

    responses: list[Any]
    trailing: dict[str, str]

    @property
    def chunks(self) -> list[Any]:
        """Of all sequences, as they came."""
        return [one.chunk for one in self.responses if one.HasField("chunk")]

    @property
    def ends(self) -> list[Any]:
        """Of the sequences, by index."""
        ends = [one.complete for one in self.responses if one.HasField("complete")]
        return sorted(ends, key=lambda end: int(end.index))

    def tokens(self, index: int = 0) -> list[int]:
        """That came in chunks, of one sequence."""
        return [id_ for chunk in self.chunks if chunk.index == index for id_ in chunk.token_ids]


class WireClient:
    """Calls by name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def call(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = 30,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Any:
        """Start a call."""
        kind = self._channel.unary_stream if method in _STREAMS else self._channel.unary_unary
        answer = type(new(_METHODS[method][1]))
        stub = kind(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return stub(request, timeout=timeout_s, metadata=tuple(metadata))

    async def ask(self, method: str, **values: Any) -> Any:
        """One question, one answer."""
        return await self.call(method, new(_METHODS[method][0], **values))

    async def read(self, method: str, **values: Any) -> list[Any]:
        """One question, all answers."""
        call = self.call(method, new(_METHODS[method][0], **values))
        return [answer async for answer in _messages(call)]

    async def generate(self, request: Any, timeout_s: float | None = 30) -> WireAnswer:
        """All responses to a request."""
        call = self.call("Generate", request, timeout_s)
        responses = [response async for response in _messages(call)]
        return WireAnswer(responses, dict(await call.trailing_metadata()))


async def _messages(call: Any) -> AsyncIterator[Any]:
    async for message in call:
        yield message
