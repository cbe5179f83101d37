"""Which parsers a chat's output needs: for reasoning, tool calls, or neither."""

from __future__ import annotations

import copy
import logging

from surestep_common.errors import InvalidRequest, UnsupportedParameter

from surestep_gateway.config import GatewaySettings
from surestep_gateway.parsers import (
    HARMONY_CALLS,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
    OutputParser,
    ReasoningParser,
)
from surestep_gateway.parsers.harmony import HarmonyParser
from surestep_gateway.text.text_processor import TextProcessor
from surestep_gateway.text.tokenizer import Tokenizer

from .prompts import PreparedRequest
from .protocol import ChatBody, ChatRequest

logger = logging.getLogger(__name__)


class ChatOutput:
    """The parsers that the server's settings and one request ask for."""

    def __init__(self, settings: GatewaySettings, prepared: PreparedRequest) -> None:
        assert isinstance(prepared.body, ChatBody)
        self._schemas = prepared.schemas if settings.tool_call_parser else {}
        self._tools = settings.tool_call_parser if self._schemas else None
        self._reasoning: ReasoningParser | None = None
        if settings.reasoning_parser:
            # It stands where the prompt ends, also within a message that is to be continued.
            new = REASONING_PARSERS.get(settings.reasoning_parser)
            self._reasoning = new(prepared.opening, self._schemas)
            self._reasoning.push(prepared.begun.rstrip())
        self._max_calls = 1 if prepared.body.parallel_tool_calls is False else None

    def parser(self) -> OutputParser:
        """Return a new parser for one output."""
        return OutputParser(
            copy.deepcopy(self._reasoning),
            TOOL_PARSERS.get(self._tools)(self._schemas) if self._tools else None,
            max_calls=self._max_calls,
        )


def with_output_format(settings: GatewaySettings, processor: TextProcessor) -> GatewaySettings:
    """Return settings that name Harmony's reasoning parser if anything else asks for Harmony.

    That is its parser of calls or, where no parser is named, the chat template. Raise
    InvalidRequest for a tokenizer that lacks a token of the format.
    """
    given = settings.reasoning_parser, settings.tool_call_parser
    asked = given[0] == HARMONY_REASONING or given[1] == HARMONY_CALLS
    lacking = [token for token in HarmonyParser.structure if processor.tokenizer.id(token) is None]
    if asked and lacking:
        raise InvalidRequest(
            f"--reasoning-parser {HARMONY_REASONING}: the tokenizer has no {lacking[0]}",
            param="reasoning_parser",
        )
    if not asked:
        if any(given) or lacking or not processor.template.writes_harmony(tools=False):
            return settings
        logger.info("the chat template is gpt-oss's: --reasoning-parser %s", HARMONY_REASONING)
    return settings.model_copy(update={"reasoning_parser": HARMONY_REASONING})


def ending_ids(settings: GatewaySettings, tokenizer: Tokenizer) -> set[int]:
    """Return the ids that end an answer in the server's format, whatever the checkpoint says."""
    if settings.reasoning_parser != HARMONY_REASONING:
        return set()
    return {id_ for end in HarmonyParser.ends_output if (id_ := tokenizer.id(end)) is not None}


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
