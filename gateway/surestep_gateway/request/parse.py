"""Parsing of request bodies; errors name the offending parameter.

Parameters that other servers implement and this one does not are refused by name, never ignored.
A value without effect (null, an empty list, the neutral value) is accepted. A parameter that cannot
affect our responses is accepted with any value; docs/use/openai.md lists those.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson
from pydantic import ValidationError
from surestep_common.errors import InvalidRequest, MissingParameter, UnsupportedParameter
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.request.protocol import UNSUPPORTED_KIND, Body, GenerationBody
from surestep_gateway.text.service import Draft, Job, TextProcessor
from surestep_gateway.text.tokenizer import Texts

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)
_NAME_CHARS = 4096  # no model has a longer name


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def model_named(raw: bytes | bytearray) -> str | None:
    """Return the model that a body names, without making objects of the rest: 4 ms for a megabyte
    of the worst.

    Raise ValueError for a body that is no object, or whose model is no text.
    """
    try:
        return _NAMED.decode(raw).model
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class Name(NamedTuple):
    """The model that a body names, if it can be read."""

    readable: bool
    name: str | None


def _name_draft(_: TextProcessor, raw: bytes | bytearray, __: SchedulerInfo) -> Draft[Name]:
    try:
        named = Name(True, model_named(raw))
    except ValueError:
        named = Name(False, None)
    if named.name is not None and len(named.name) > _NAME_CHARS:
        named = Name(True, f"{named.name[:_NAME_CHARS]}…")
    return Draft(Texts([], add_special_tokens=False), lambda _: named)


NAME = Job(
    b"name",
    _name_draft,
    lambda named: [orjson.dumps([*named])],
    lambda parts: Name(*orjson.loads(parts[0])),
)


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """Parse the body as `kind`. Raise InvalidRequest that names the first offending parameter."""
    return parse_by(kind.model_validate_json, raw)


def parse_by(validate: Callable[[bytes | bytearray], B], raw: bytes | bytearray) -> B:
    """Parse a body that may be of several kinds. Raise InvalidRequest as `parse` does."""
    try:
        body = validate(raw)
    except ValidationError as error:
        raise _first_problem(error) from None
    _log_unknown(body)
    return body


def parse_fields(kind: type[B], fields: dict[str, Any]) -> B:
    """Make a body of fields that came in another form. Raise InvalidRequest as `parse` does."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as an API does.

    `names` has its names for those of a chat, by patterns of how these begin.
    """
    try:
        yield
    except InvalidRequest as error:
        old = error.param or ""
        for pattern, name in names.items():
            new, found = re.subn(rf"^{pattern}(?!\w)", name, old)
            if found:
                place = rf"(?<!\w){re.escape(old)}(?!\w)"
                message = re.sub(place, new.replace("\\", r"\\"), error.message)
                raise type(error)(message, param=new) from None
        raise


def _log_unknown(body: Body) -> None:
    if body.model_extra and logger.isEnabledFor(logging.DEBUG):
        unknown = sorted(body.model_extra.keys() - UNSUPPORTED - WITHOUT_EFFECT)
        logger.debug("parameters without meaning here: %s", ", ".join(unknown) or "none")


def _first_problem(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # A field of several types has a problem per type; a wrong type is the least specific one.
    places = [_place(one["loc"]) for one in problems]
    same_field = [one for one, at in zip(problems, places, strict=True) if at[:1] == places[0][:1]]
    precise = [one for one in same_field if not one["type"].endswith("_type")]
    problem = (precise or problems)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {message}")
    param = _dotted(_place(problem["loc"]))
    if problem["type"] == "missing":
        return MissingParameter(f"missing required parameter '{param}'", param=param)
    if problem["type"] == UNSUPPORTED_KIND:
        return UnsupportedParameter(f"'{param}' is not supported: {message}", param=param)
    return InvalidRequest(f"{param or 'body'}: {message}", param=param or None)


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a location without the names of union members."""
    types = ("str", "dict", "list")
    return tuple(
        part
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in types)
    )


def _dotted(place: tuple[int | str, ...]) -> str:
    """`messages[0].role`"""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


_NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
# Values that mean "off" in place of these; null does in any case.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "length_penalty": (1,),
    "modalities": ([], ["text"]),
    "text": ({}, {"format": {"type": "text"}}),
    "n": (1,),
    "padding": ("do_not_pad",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
}
# Reasoning is in items in plain text anyway, and what the others add to is never there: calls of
# tools that do not run here, and pictures.
INCLUDED = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_OF_PROMPTS = frozenset(
    {
        "documents",
        "functions",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "prompt_embeds",
        "suffix",
    }
)
# Where a body has a field of such a name it is served: these are looked for among the others.
UNSUPPORTED = _OF_PROMPTS | {
    "audio",
    "early_stopping",
    "ec_transfer_params",
    "format",
    "function_call",
    "grammar_lazy",
    "grammar_triggers",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "logprob_token_ids",
    "modalities",
    "moderation",
    "output_config",
    "output_format",
    "return_prompt_text",
    "routed_experts_prompt_start",
    "text",
    "thinking_token_budget",
    "tool_choice",
    "use_beam_search",
    "verbosity",
    "vllm_xargs",
    "watermarking",
    "web_search_options",
}
# Of requests to the Responses API, besides those above.
NOT_IN_RESPONSES = frozenset(
    {
        "background",
        "context_management",
        "conversation",
        "echo",
        "enable_response_messages",
        "logprobs",
        "messages",
        "n",
        "previous_input_messages",
        "prompt",
        "prompt_logprobs",
        "top_logprobs",
    }
)
# Of requests to the Messages API.
NOT_IN_MESSAGES = frozenset({"container", "mcp_servers", "n"})
NOT_EMBEDDED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "embed_dtype",
        "endianness",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "padding",
        "prompt_embeds",
        "stream",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "mm_payload",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "return_token_offsets",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",
    }
)


def refuse_unsupported(body: GenerationBody) -> None:
    """Raise UnsupportedParameter for the first parameter whose effect is not implemented."""
    _refuse(body, UNSUPPORTED)
    extra, n = body.model_extra or {}, body.n or 1
    if extra.get("tools") and extra.get("tool_choice") != "none":
        raise UnsupportedParameter(
            "'tools' are not supported unless 'tool_choice' is \"none\"", param="tools"
        )
    if extra.get("best_of") not in (None, n):
        raise UnsupportedParameter(
            f"'best_of' is not supported unless equal to n={n}", param="best_of"
        )


def refuse_in_responses(body: Body) -> None:
    """Raise UnsupportedParameter for what the Responses API has and this server has not."""
    _refuse(body, NOT_IN_RESPONSES)
    include = (body.model_extra or {}).get("include")
    for wanted in include if isinstance(include, list) else ():
        if wanted not in INCLUDED:
            raise UnsupportedParameter(f"'include' of '{wanted}' is not supported", param="include")


def refuse_in_messages(body: Body) -> None:
    """Raise UnsupportedParameter for what the Messages API has and this server has not."""
    _refuse(body, NOT_IN_MESSAGES)


def refuse_for_embeddings(body: Body) -> None:
    """Raise UnsupportedParameter for an embedding request, where chats are not served either."""
    _refuse(body, NOT_EMBEDDED)


def refuse_unsupported_in_prompt(body: Body) -> None:
    """Raise UnsupportedParameter for what would change the prompt of a body without output."""
    _refuse(body, _OF_PROMPTS)


def _refuse(body: Body, names: frozenset[str]) -> None:
    extra = body.model_extra or {}
    for name in sorted(names & extra.keys()):
        value = extra[name]
        if value is not None and value not in _NEUTRAL.get(name, _NOTHING):
            raise UnsupportedParameter(f"'{name}' is not supported", param=name)
