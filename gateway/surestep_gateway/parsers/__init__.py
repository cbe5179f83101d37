"""Reasoning and tool calls in the text of a model."""

from __future__ import annotations

from .base import (
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
    coalesce,
    content_of,
)
from .output import OutputParser
from .registry import HARMONY_CALLS, HARMONY_REASONING, REASONING_PARSERS, TOOL_PARSERS

__all__ = [
    "HARMONY_CALLS",
    "HARMONY_REASONING",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Content",
    "Event",
    "OutputParser",
    "Reasoning",
    "ReasoningParser",
    "ToolArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "coalesce",
    "content_of",
]
