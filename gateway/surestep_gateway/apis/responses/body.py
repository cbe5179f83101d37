"""The body of requests to the Responses API: OpenAI's fields, and vLLM's extra ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from surestep_gateway.request.protocol import (
    MAX_MESSAGES,
    Body,
    Natural,
    Positive,
    SamplingBody,
    StreamOptions,
)

from .items import CheckedItem
from .tools import ToolChoice, Tools

MAX_METADATA = 16

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ResponseId = Annotated[str, Field(min_length=1, max_length=128)]


class ReasoningOptions(Body):
    """`summary` is without effect: reasoning is given as it was written."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    """The format of the answer; `schema` is a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def _kind_of_input(given: Any) -> str:
    return "<items>" if isinstance(given, list) else "<text>"


class ResponseRequest(SamplingBody):
    """POST /v1/responses"""

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[CheckedItem],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            Tag("<items>"),
        ],
        Discriminator(_kind_of_input),
    ]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Natural | None = None  # no effect: there are no built-in tools
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    previous_response_id: ResponseId | None = None
    reasoning: ReasoningOptions | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: ToolChoice | None = None
    tools: Tools | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
