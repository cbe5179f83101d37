"""Which parsers a chat's output needs: for reasoning, tool calls, or neither."""

from __future__ import annotations

import copy

from surestep_common.errors import InvalidRequest, UnsupportedParameter

from surestep_gateway.config import GatewaySettings
from surestep_gateway.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser, ReasoningParser

from .prompts import PreparedRequest
from .protocol import ChatBody, ChatRequest


class ChatOutput:
    """The parsers that the server's settings and one request ask for."""

    def __init__(self, settings: GatewaySettings, prepared: PreparedRequest) -> None:
        assert isinstance(prepared.body, ChatBody)
        self._reasoning: ReasoningParser | None = None
        if settings.reasoning_parser:
            # It stands where the prompt ends, also within a message that is to be continued.
            self._reasoning = REASONING_PARSERS.get(settings.reasoning_parser)(prepared.opening)
            self._reasoning.push(prepared.begun.rstrip())
        self._tools = settings.tool_call_parser if prepared.schemas else None
        self._schemas = prepared.schemas
        self._max_calls = 1 if prepared.body.parallel_tool_calls is False else None

    def parser(self) -> OutputParser:
        """Return a new parser for one output."""
        return OutputParser(
            copy.deepcopy(self._reasoning),
            TOOL_PARSERS.get(self._tools)(self._schemas) if self._tools else None,
            max_calls=self._max_calls,
        )


def check_tool_choice(settings: GatewaySettings, request: ChatRequest) -> None:
    """Raise InvalidRequest for a tool_choice that this server cannot enforce."""
    choice = request.tool_choice
    if request.tools is None and choice not in (None, "none"):
        raise InvalidRequest(
            "'tool_choice' is only allowed when 'tools' are specified", param="tool_choice"
        )
    if choice not in (None, "none", "auto"):
        raise UnsupportedParameter(
            '\'tool_choice\' is supported as "auto" or "none": to make the model call a tool is '
            "not supported, it needs constrained decoding",
            param="tool_choice",
        )
    if request.tools and choice != "none" and not settings.enable_auto_tool_choice:
        raise UnsupportedParameter(
            '"auto" tool choice requires the server to run with --enable-auto-tool-choice and '
            "--tool-call-parser",
            param="tool_choice",
        )
