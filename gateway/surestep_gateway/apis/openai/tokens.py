"""Jobs of tokens in, tokens out, as vLLM has it: tokens of a chat or a text, and what follows them.

A router renders a request at any server, and generates at the one that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
from pydantic import Field
from surestep_common.errors import UnsupportedParameter
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.request.parse import parse
from surestep_gateway.request.prepare import (
    draft_chat,
    draft_completion,
    draft_completion_request,
)
from surestep_gateway.request.prepared import (
    PreparedRequest,
    dump_prepared,
    load_prepared,
    max_tokens,
)
from surestep_gateway.request.protocol import (
    Body,
    CompletionRequest,
    RequestId,
    SamplingBody,
    StreamOptions,
    TokenIds,
)
from surestep_gateway.text.service import Draft, Job, TextProcessor, dump_bytes, load_bytes

Json = dict[str, Any]

_KEPT = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id", "emitted_ids")
_NOT_SERVED = ("features", "kv_transfer_params", "lora_request")
# Of vLLM's sampling parameters, what text and its transport are made of there.
_WITHOUT_EFFECT = ("detokenize", "output_kind", "skip_clone", "flat_logprobs", "extra_args")
# Fields that a body and vLLM's sampling parameters have in common.
_SAMPLED = {"n", "prompt_logprobs", "repetition_detection", *SamplingBody.model_fields} - {
    *_KEPT,
    "safety_identifier",
    "spaces_between_special_tokens",
    "speculative",
    "user",
}


class GenerateBody(Body):
    """POST /inference/v1/generate"""

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: RequestId | None = None
    emitted_ids: TokenIds | None = Field(None, min_length=1)


def draft_generate(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """POST /inference/v1/generate: a completion of ids. Raise SurestepError."""
    body = parse(GenerateBody, raw)
    for name in _NOT_SERVED:
        if (body.model_extra or {}).get(name):
            raise UnsupportedParameter(f"'{name}' is not supported", param=name)
    params = {k: v for k, v in body.sampling_params.items() if k not in _WITHOUT_EFFECT}
    if params.get("max_tokens") is None:
        room = max(info.max_model_len - len(body.token_ids), 1)
        params["max_tokens"] = min(info.defaults.max_tokens or room, room)
    fields = body.model_dump(include={*_KEPT}, exclude_none=True) | {"prompt": body.token_ids}
    request = parse(CompletionRequest, orjson.dumps(params | fields))
    return draft_completion_request(processor, request, info)


def draft_rendered_chat(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """POST /v1/chat/completions/render. Raise SurestepError."""
    draft = draft_chat(processor, raw, info)
    return _rendered(draft, info, lambda requests: requests[0])


def draft_rendered_completion(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """POST /v1/completions/render. Raise SurestepError."""
    return _rendered(draft_completion(processor, raw, info), info, list)


def _rendered(
    draft: Draft[PreparedRequest],
    info: SchedulerInfo,
    shape: Callable[[list[Json]], Any],
) -> Draft[bytes]:
    def finish(encoded: Sequence[list[int]]) -> bytes:
        prepared = draft.finish(encoded)
        if prepared.sampling.HasField("grammar"):
            raise UnsupportedParameter(
                "what an answer must be is not rendered: give it to /inference/v1/generate as "
                "sampling_params.structured_outputs",
                param="response_format",
            )
        prompts = (prompt.token_ids for prompt in prepared.prompts)
        return orjson.dumps(shape([_request(prepared, prompt, info) for prompt in prompts]))

    return Draft(draft.texts, finish)


def _request(prepared: PreparedRequest, prompt: Sequence[int], info: SchedulerInfo) -> Json:
    """Return a body for /inference/v1/generate that stands for a prompt of the request."""
    body = prepared.body
    given = body.model_dump(include={*_SAMPLED, *_KEPT}, exclude_none=True)
    asked = max_tokens(body, len(prompt), info)
    sampled = {name: given[name] for name in _SAMPLED if name in given}
    sampled |= _of_tokens(prepared.sampling)
    if asked is not None:
        sampled["max_tokens"] = asked
    kept = {name: given.get(name) for name in ("model", "stream", "stream_options", "cache_salt")}
    return {
        **({"request_id": given["request_id"]} if "request_id" in given else {}),
        "token_ids": list(prompt),
        "features": None,
        "sampling_params": sampled,
        **kept,
        "priority": given.get("priority", 0),
        "kv_transfer_params": None,
    }


def _of_tokens(sampling: SamplingParams) -> Json:
    """Return the parameters that were made of the body's, the model's own ends included."""
    made: Json = {"stop_token_ids": list(sampling.stop_token_ids)}
    if sampling.want_logprobs:
        made["logprobs"] = sampling.num_top_logprobs
    return made


GENERATE: Job[PreparedRequest] = Job(b"generate", draft_generate, dump_prepared, load_prepared)
RENDER_CHAT: Job[bytes] = Job(b"render-chat", draft_rendered_chat, dump_bytes, load_bytes)
RENDER_COMPLETION: Job[bytes] = Job(
    b"render-completion", draft_rendered_completion, dump_bytes, load_bytes
)
