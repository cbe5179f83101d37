"""Request bodies: the OpenAI fields, vLLM's extra ones, and ours.

Ranges that do not depend on the model are declared here; `prepared.py` checks the rest. Types are
strict: a number in quotes is refused, and a fraction where an integer is meant. Unknown names are
accepted, and logged at DEBUG.

A list fails at its first wrong element and a mapping that is too large before its values are
checked, because every problem that is found is an object, and a body can have millions of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, LiteralString, Self

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from surestep_common.request_params import (
    LEAST_REPETITION,
    MAX_ALLOWED_IDS,
    MAX_BIASES,
    MOST_REPETITION,
)

from surestep_gateway.grammars.fields import StructuredBody

CUT = ("length", "abort")  # reasons for which an output ends in the middle
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_DRAFT_TOKENS = 16
MAX_USER_CHARS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 256
UINT31 = (1 << 31) - 1
UNSUPPORTED_KIND = "unsupported"  # of a problem with what is not served
_KIND_CHARS = 32  # shown of one that is not


def unsupported(message: LiteralString, kind: str) -> PydanticCustomError:
    """Return the problem with a kind that is not served; `message` has it as '{kind}'."""
    return PydanticCustomError(UNSUPPORTED_KIND, message, {"kind": kind[:_KIND_CHARS]})


def _whole(value: Any) -> Any:
    """Return a whole float as an integer: languages with one kind of number send 4.0 for 4."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
TokenIds = Annotated[list[Annotated[Whole, Field(ge=0)]], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Positive = Annotated[Whole, Field(ge=1, le=UINT31)]
User = Annotated[str, Field(max_length=MAX_USER_CHARS)]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Natural = Annotated[Whole, Field(ge=0, le=UINT31)]


def _at_most(count: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"must have at most {count} entries, not {len(value)}")
        return value

    return check


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class RequestOptions(Body):
    """Base of the fields kept with a prepared request; unknown ones are dropped."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(RequestOptions):
    """`continuous_usage_stats` has an effect only with `include_usage`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect: nothing is obfuscated


class Speculative(RequestOptions):
    """Speculation of this request, our own field. The output does not depend on it."""

    num_tokens: Annotated[Whole, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = (
        None  # per step; 0 = off
    )
    return_drafted: bool | None = None  # mark in the choices which tokens were drafts


class RepetitionDetection(RequestOptions):
    """When an output ends because it repeats itself; vLLM's field. No `max_pattern_size`: never."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Annotated[Whole, Field(ge=0, le=1024)] = 0  # tokens
    min_pattern_size: Annotated[Whole, Field(ge=0, le=1024)] = 0
    min_count: Annotated[Whole, Field(ge=0, le=UINT31)] = 0

    @model_validator(mode="after")
    def _patterns_can_repeat(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size must not exceed max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be 2 at least")
        return self


class Truncation(Body):
    """Truncation of a prompt that is too long."""

    default_side: ClassVar[Literal["left", "right"]] = "left"

    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=UINT31)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # where that cuts


class SamplingBody(Body):
    """The fields that all APIs which generate have in common. None means the default."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_CHARS)]
        | Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            BeforeValidator(_at_most(MAX_BIASES)),
        ]
        | None
    ) = None
    user: User | None = None
    safety_identifier: User | None = None  # OpenAI's later name for it

    top_k: Annotated[Whole, Field(ge=-1, le=UINT31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_REPETITION, le=MOST_REPETITION)] | None = (
        None
    )
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # no effect on the tokenizers we read
    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None

    speculative: Speculative | None = None


class GenerationBody(SamplingBody, Truncation, StructuredBody):
    """The fields that chat and completions share. None means the default."""

    max_tokens: Positive | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[Whole, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    repetition_detection: RepetitionDetection | None = None


Name = Annotated[str, Field(min_length=1)]


class CalledFunction(Body):
    """A function call of an earlier response. `arguments` is JSON text or an object."""

    name: Name
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A tool call of an earlier response."""

    function: CalledFunction


class ChatMessage(Body):
    """A message. Further fields are passed on to the template."""

    role: Name
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, by its older name
    refusal: str | None = None  # of an earlier answer, which has no content then
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # calls must have arguments as `parameters` says


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Name


class NamedToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools; `mode` says whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)
    ]


class AllowedToolChoice(Body):
    """The tools that may be called; the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class TemplateFields(Body):
    """The fields that determine how messages become a prompt."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "<word>"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "<allowed_tools>" if kind == "allowed_tools" else "<function>"


class ChatBody(GenerationBody):
    """The options of a chat besides its messages."""

    echo: bool | None = None  # the last message comes first in the answer, if it is the assistant's
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<word>")]
            | Annotated[NamedToolChoice, Tag("<function>")]
            | Annotated[AllowedToolChoice, Tag("<allowed_tools>")],
            Discriminator(_kind_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[Whole, Field(ge=-1, le=UINT31)] | None = None  # -1: any number
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0)] | None = None


class ChatRequest(TemplateFields, ChatBody):
    """POST /v1/chat/completions"""


class CompletionBody(GenerationBody):
    """The options of a completion besides its prompts."""

    max_tokens: Natural | None = None  # with 0 nothing is generated: prompts are scored, or echoed
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0)] | None = None
    # Tokens of this answer that another server has delivered already: it goes on behind them.
    emitted_ids: Annotated[TokenIds, Field(min_length=1)] | None = None


def kind_of_prompt(prompt: Any) -> str:
    """Return which of the four kinds it is, by its first element; trying all takes far longer."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else 0
    if isinstance(first, str):
        return "list[str]"
    return "list[list[int]]" if isinstance(first, list) else "list[int]"


class CompletionRequest(CompletionBody):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[TokenIds, Tag("list[int]")]
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("list[str]")]
        | Annotated[
            list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("list[list[int]]")
        ],
        Discriminator(kind_of_prompt),
    ]


def json_text(value: Any) -> bytes:
    """Return the JSON text of a value from a request, whose integers may have any size."""
    try:
        return orjson.dumps(value)
    except TypeError:  # more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
