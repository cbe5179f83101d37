"""The bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from surestep_gateway.request.protocol import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    Body,
    Name,
    Positive,
    SamplingBody,
    Stop,
    User,
    unsupported,
)


class TextBlock(Body):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; `signature` is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic's models can read: left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else "<text>"


def _known(*kinds: str) -> BeforeValidator:
    """Return the check that a block is of one of these kinds."""

    def check(block: Any) -> Any:
        kind = _kind(block)[1:-1]
        if kind not in kinds:
            raise unsupported("no blocks of type '{kind}' here", kind)
        return block

    return BeforeValidator(check)


OnlyText = Annotated[TextBlock, _known("text")]
Texts = Annotated[list[OnlyText], Field(fail_fast=True)]


class ToolResultBlock(Body):
    """Result of a call, with parts of any type; that it is an error is for the text to say."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class MediaBlock(Body):
    """A picture or document: left out beside a result, with a line that says so, else refused."""

    type: Literal["image", "document"]


Block = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ToolResultBlock, Tag("<tool_result>")]
        | Annotated[MediaBlock, Tag("<image>")]
        | Annotated[MediaBlock, Tag("<document>")],
        Discriminator(_kind),
    ],
    _known("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document"),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class Thinking(Body):
    """Switch for reasoning first; `budget_tokens` is without effect."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesTool(Body):
    """A function that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None  # of the tool, where that is the type
    disable_parallel_tool_use: bool | None = None


class Metadata(Body):
    user_id: User | None = None


def _functions_only(tool: Any) -> Any:
    """Raise for a tool that Anthropic's servers would run."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("custom", None):
        raise unsupported("no tools of type '{kind}'", str(kind))
    return tool


class MessagesBody(SamplingBody):
    """The fields that make the prompt, and those that sample."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Positive | None = None
    system: str | Texts | None = None
    stop_sequences: (
        Annotated[list[Stop], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of its format
    tools: (
        Annotated[
            list[Annotated[MessagesTool, BeforeValidator(_functions_only)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: MessagesToolChoice | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(MessagesBody):
    """POST /v1/messages"""

    max_tokens: Positive


class CountTokensRequest(MessagesBody):
    """POST /v1/messages/count_tokens"""
