"""What to look for in the output of a chat: reasoning, tool calls, or neither."""

from __future__ import annotations

from typing import Any

from surestep_common.errors import InvalidRequest

from .config import GatewaySettings
from .parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser, ReasoningParser
from .prompts import ChatPrompt
from .protocol import ChatBody


class ChatOutput:
    """The parsers that the server's settings and one request ask for."""

    def __init__(self, settings: GatewaySettings, body: ChatBody) -> None:
        """Raises InvalidRequest for a choice of tools that this server cannot keep."""
        _check_choice(settings, body)
        self._body = body
        self._reasoning = settings.reasoning_parser
        calls = bool(body.tools) and body.tool_choice != "none"
        self._tools = settings.tool_call_parser if calls else None

    def parser(self, prompt: ChatPrompt) -> OutputParser:
        """A fresh one for an output that goes on from `prompt`."""
        return OutputParser(
            _reasoning_parser(self._reasoning, prompt) if self._reasoning else None,
            TOOL_PARSERS.get(self._tools)(_schemas(self._body)) if self._tools else None,
            max_calls=1 if self._body.parallel_tool_calls is False else None,
        )


def _reasoning_parser(name: str, prompt: ChatPrompt) -> ReasoningParser:
    """One that stands where the prompt ends, also within a message that is to be continued."""
    begun = prompt.begun.rstrip()
    parser = REASONING_PARSERS.get(name)(prompt.text.rstrip().removesuffix(begun))
    parser.push(begun)
    return parser


def _check_choice(settings: GatewaySettings, body: ChatBody) -> None:
    choice = body.tool_choice
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            '\'tool_choice\' is supported as "auto" or "none": to make the model call a tool is '
            "not supported, it needs constrained decoding",
            param="tool_choice",
        )
    if body.tools and choice != "none" and not settings.enable_auto_tool_choice:
        raise InvalidRequest(
            '"auto" tool choice requires the server to run with --enable-auto-tool-choice and '
            "--tool-call-parser",
            param="tool_choice",
        )


def _schemas(body: ChatBody) -> dict[str, dict[str, Any]]:
    return {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
