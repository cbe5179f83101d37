"""Prompts: from text or token ids to the ids that the model reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from surestep_common.errors import InvalidRequest
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest, SchedulerInfo

from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_gateway.text.wire import Parts

from .protocol import ChatBody, CompletionBody, CompletionRequest, Truncation
from .sampling import beyond_context, fit_prompt, kept_part

# Fields that the sampling parameters or the prompts contain already.
_LEFT_OUT = {
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    *StructuredBody.model_fields,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: Sequence[int]  # packed: four bytes an id, and copied at the speed of memory
    text: str | None = None  # where it will be echoed


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A generation request that has passed every check of text and parameters."""

    body: ChatBody | CompletionBody  # without messages and prompts
    prompts: Sequence[Prompt]
    sampling: SamplingParams  # without seed
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the tools' parameters
    promised: dict[str, bytes] = field(default_factory=dict)  # schemas that answers are checked by
    opening: str = ""  # end of a chat's prompt, without the part of the answer
    begun: str = ""  # the part of the answer that it ends with
    role: str = ""  # of a chat's answer


def packed(ids: Sequence[int]) -> Sequence[int]:
    """Return ids as the protocol's messages store them."""
    return GenerateRequest(prompt_ids=ids).prompt_ids


def bounded_text(
    text: str, tokenizer: Tokenizer, body: Truncation, max_tokens: int, param: str
) -> str:
    """Return `text`, or what truncation keeps of one that must exceed `max_tokens`.

    Raise ContextOverflow for a text that is certainly too long, before it is tokenised.
    """
    most = tokenizer.most_chars(max_tokens)
    if most is None or len(text) <= most or (length := tokenizer.length(text)) <= most:
        return text
    if body.truncate_prompt_tokens is not None:
        return text[kept_part(most, body)]
    problem = f"the prompt is too long: its {length} characters cannot fit"
    raise beyond_context(max_tokens, problem, param)


def ids_and_texts(
    given: str | list[str] | list[int] | list[list[int]], param: str
) -> tuple[list[list[int]], list[str]]:
    """Return the prompts given as ids, and those given as text. Raise InvalidRequest for none."""
    if isinstance(given, str):
        return [], [given]
    if not given:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    if isinstance(given[0], int):
        return [given], []
    if isinstance(given[0], list):
        return given, []
    return [], given


def completion_prompt(
    ids: list[int],
    text: str | None,
    request: CompletionRequest,
    tokenizer: Tokenizer,
    info: SchedulerInfo,
) -> Prompt:
    """Return a prompt that fits, with its text if that is to be echoed. Raise InvalidRequest."""
    fitted = fit_prompt(ids, request, info, "prompt")
    if not request.echo:
        text = None
    elif text is None or len(fitted) < len(ids):
        text = tokenizer.decode(fitted, skip_special_tokens=False)
    return Prompt(token_ids=packed(fitted), text=text)


def dump_prepared(prepared: PreparedRequest) -> Parts:
    """Serialise a generation request."""
    kind = ChatBody if isinstance(prepared.body, ChatBody) else CompletionBody
    fields = kind.model_fields.keys() - _LEFT_OUT
    body = prepared.body.model_dump_json(include=fields, exclude_none=True)
    about = {
        "kind": kind.__name__,
        "body": orjson.Fragment(body),
        "opening": prepared.opening,
        "begun": prepared.begun,
        "role": prepared.role,
        "texts": [prompt.text for prompt in prepared.prompts],
        "promised": list(prepared.promised),
    }
    ids = (GenerateRequest(prompt_ids=prompt.token_ids) for prompt in prepared.prompts)
    return [
        orjson.dumps(about),
        json.dumps(prepared.schemas, ensure_ascii=False).encode(),  # integers of any size
        prepared.sampling.SerializeToString(),
        *prepared.promised.values(),
        *(one.SerializeToString() for one in ids),
    ]


def load_prepared(parts: Sequence[bytes]) -> PreparedRequest:
    about, schemas, sampling, *rest = orjson.loads(parts[0]), *parts[1:]
    names, ids = about["promised"], rest[len(about["promised"]) :]
    kind = ChatBody if about["kind"] == ChatBody.__name__ else CompletionBody
    return PreparedRequest(
        body=kind.model_validate(about["body"]),
        prompts=[
            Prompt(token_ids=GenerateRequest.FromString(one).prompt_ids, text=text)
            for one, text in zip(ids, about["texts"], strict=True)
        ],
        sampling=SamplingParams.FromString(sampling),
        schemas=json.loads(schemas),
        promised=dict(zip(names, rest, strict=False)),
        opening=about["opening"],
        begun=about["begun"],
        role=about["role"],
    )
