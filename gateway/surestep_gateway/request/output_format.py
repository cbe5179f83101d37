"""Choose the parsers of a chat's output: for reasoning, tool calls, or neither."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_proto.sampling_pb2 import Grammar

from surestep_gateway.grammars.asked import content_language
from surestep_gateway.grammars.call_formats import parser_of
from surestep_gateway.grammars.calls import Tools
from surestep_gateway.grammars.config import JsonStyle
from surestep_gateway.grammars.fields import ResponseFormat, StructuredBody
from surestep_gateway.grammars.reasoning import THINKING_BUDGET, Format, Wanted, constraint
from surestep_gateway.grammars.structured import served_schema
from surestep_gateway.parsers import (
    HARMONY_CALLS,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
    OutputParser,
    ReasoningParser,
)
from surestep_gateway.parsers.harmony import HarmonyParser
from surestep_gateway.request.prepared import PreparedRequest
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.service import TextProcessor
from surestep_gateway.text.tokenizer import Tokenizer

from .protocol import (
    AllowedToolChoice,
    ChatBody,
    ChatRequest,
    Function,
    GenerationBody,
    NamedToolChoice,
)

logger = logging.getLogger(__name__)

# Of a call that a template is to write: Kimi's shows ids of this form, Mistral's want nine letters.
_FUNCTION, _ARGUMENT = "trial_call", ("place", "Oslo")
_CALL_IDS = "call00000", f"functions.{_FUNCTION}:0"
_FIXED_FORMATS = (None, "text", "json_object")  # whose grammar has nothing of the request


class ChatOutput:
    """The parsers that the server's settings and one request ask for."""

    def __init__(self, settings: GatewaySettings, prepared: PreparedRequest) -> None:
        assert isinstance(prepared.body, ChatBody)
        self._schemas = prepared.schemas if settings.tool_call_parser else {}
        self._tools = settings.tool_call_parser if self._schemas else None
        self.reasoning: ReasoningParser | None = None  # as it stands where the prompt ends
        if settings.reasoning_parser:
            # It stands where the prompt ends, also within a message that is to be continued.
            new = REASONING_PARSERS.get(settings.reasoning_parser)
            self.reasoning = new(prepared.opening, self._schemas)
            self.reasoning.push(prepared.begun.rstrip())
        # A grammar has nothing of the reasoning, and so not of calls in it.
        self._calls_in_reasoning = not prepared.sampling.HasField("grammar")
        self._max_calls = 1 if prepared.body.parallel_tool_calls is False else None

    def parser(self) -> OutputParser:
        """Return a new parser for one output."""
        return OutputParser(
            copy.deepcopy(self.reasoning),
            TOOL_PARSERS.get(self._tools)(self._schemas) if self._tools else None,
            calls_in_reasoning=self._calls_in_reasoning,
            max_calls=self._max_calls,
        )


def with_output_format(settings: GatewaySettings, processor: TextProcessor) -> GatewaySettings:
    """Return settings with the parsers that the chat template tells, where none is named.

    Those are Harmony's, and the one that reads calls as the template writes them. Raise
    InvalidRequest for a tokenizer that lacks a token of Harmony, and where the model is to call
    tools in a format that neither tells.
    """
    settings = _with_harmony(settings, processor)
    if settings.tool_call_parser is None and (parser := _parser_of_calls(processor)) is not None:
        logger.info("the chat template shows how tools are called: --tool-call-parser %s", parser)
        told = {"tool_call_parser": parser, "enable_auto_tool_choice": True}
        settings = settings.model_copy(update=told)
    if settings.enable_auto_tool_choice and settings.tool_call_parser is None:
        raise InvalidRequest(
            "--enable-auto-tool-choice needs --tool-call-parser, as the chat template shows no "
            "format of calls that is known",
            param="enable_auto_tool_choice",
        )
    return settings


def _parser_of_calls(processor: TextProcessor) -> str | None:
    """Return the parser of the format in which a template writes the calls of earlier answers."""
    name, (key, value) = _FUNCTION, _ARGUMENT
    schema = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    tool = {"name": name, "description": name, "parameters": schema}
    call = {"name": name, "arguments": {key: value}}
    for id_ in _CALL_IDS:
        text = processor.template.with_call(
            {"type": "function", "function": tool},
            {"type": "function", "id": id_, "function": call},
        )
        # Some of Mistral's have the id between name and arguments.
        text = text.replace(f"[CALL_ID]{id_}", "")
        if (parser := parser_of(text, name, key, value)) is not None:
            return parser
    return None


def _with_harmony(settings: GatewaySettings, processor: TextProcessor) -> GatewaySettings:
    """Return settings that name Harmony's parsers if anything asks for Harmony.

    That is one of them or, where no parser is named, the chat template.
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
    told: dict[str, Any] = {"reasoning_parser": HARMONY_REASONING}
    if given[1] is None:
        told |= {"tool_call_parser": HARMONY_CALLS, "enable_auto_tool_choice": True}
    return settings.model_copy(update=told)


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
    if not request.tools or choice == "none":
        return
    if not _must_call(request) and not settings.enable_auto_tool_choice:
        raise UnsupportedParameter(
            '"auto" tool choice requires the server to run with --enable-auto-tool-choice and '
            "--tool-call-parser",
            param="tool_choice",
        )
    if settings.tool_call_parser is None:
        raise UnsupportedParameter(
            "tool choice requires the server to run with --tool-call-parser", param="tool_choice"
        )
    offered = {tool.function.name for tool in request.tools}
    for name in _chosen(request) or ():
        if name not in offered:
            raise InvalidRequest(
                f"'tool_choice' names '{name}', which is none of the tools", param="tool_choice"
            )


def callable_tools(request: ChatRequest) -> list[tuple[int, Function]]:
    """Return the functions that `tool_choice` lets the model call, with their places in `tools`."""
    if request.tool_choice == "none":
        return []
    chosen = _chosen(request)
    functions = enumerate(tool.function for tool in request.tools or ())
    return [(n, one) for n, one in functions if chosen is None or one.name in chosen]


def _chosen(request: ChatRequest) -> list[str] | None:
    """Return the names that `tool_choice` has, None where it has none."""
    match request.tool_choice:
        case NamedToolChoice(function=function):
            return [function.name]
        case AllowedToolChoice(allowed_tools=allowed):
            return [tool.function.name for tool in allowed.tools]
    return None


def _must_call(request: ChatRequest) -> bool:
    """Return whether the output is calls and nothing else."""
    choice = request.tool_choice
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedToolChoice)


def wanted_output(processor: TextProcessor, request: GenerationBody) -> Wanted | None:
    """Return what a request asks of its output, None if nothing. Raise InvalidRequest."""
    budget = _thinking_budget(processor.settings, request)
    asked = any(getattr(request, name) is not None for name in StructuredBody.model_fields)
    calls = isinstance(request, ChatRequest) and constrains_calls(request)
    if not asked and not calls and budget is None:
        return None
    style = processor.settings.structured_outputs().style()
    content = content_language(request, style, processor.tokenizer.in_grammars)
    tools = None
    if isinstance(request, ChatRequest) and (content is not None or calls):
        tools = _wanted_tools(request, style._replace(additional_properties=False))
    return Wanted(content, tools, budget) if (content, tools, budget) != (None,) * 3 else None


def _thinking_budget(settings: GatewaySettings, request: GenerationBody) -> int | None:
    """Return the most tokens of reasoning; None: any number. Raise UnsupportedParameter."""
    budget = request.thinking_token_budget if isinstance(request, ChatBody) else None
    if budget is None or budget < 0:
        return None
    reason = ""
    if settings.reasoning_parser is None:
        reason = "requires the server to run with --reasoning-parser"
    elif settings.reasoning_parser == HARMONY_REASONING:
        reason = "is not supported for gpt-oss, which has 'reasoning_effort'"
    elif settings.structured_outputs().enable_in_reasoning:
        reason = "is not supported by a server with enable_in_reasoning"
    if reason:
        raise UnsupportedParameter(f"'{THINKING_BUDGET}' {reason}", param=THINKING_BUDGET)
    return budget


def grammar_field(request: GenerationBody) -> str | None:
    """Return the first field whose text becomes a part of a grammar.

    None for no grammar, and for the one of any JSON object. All others have sizes and costs that
    the client decides.
    """
    for name in StructuredBody.model_fields:
        value = getattr(request, name)
        if value not in (None, "", False) and not _is_fixed(value):
            return name
    if not isinstance(request, ChatRequest) or not request.tools:
        return None
    asked = request.response_format
    any_object = request.guided_json_object or (asked is not None and asked.type == "json_object")
    return "tools" if any_object or constrains_calls(request) else None


def _is_fixed(value: Any) -> bool:
    """Return whether a field's value asks for a grammar that has nothing of the request."""
    return value is True or (
        isinstance(value, ResponseFormat)
        and value.type in _FIXED_FORMATS
        and value.bare_schema is None
    )


def constrains_calls(request: ChatRequest) -> bool:
    """Return whether a request says more of calls than which tools there are."""
    choice = request.tool_choice
    if choice in (None, "auto"):
        return any(tool.function.strict for tool in request.tools or ())
    return choice != "none"


def _wanted_tools(request: ChatRequest, style: JsonStyle) -> Tools | None:
    """Return the tools and what their calls must be, None where none may be called.

    Raise InvalidRequest.
    """
    functions = callable_tools(request)
    if not functions:
        return None
    required, chosen = _must_call(request), _chosen(request) is not None
    schemas: dict[str, dict[str, Any] | None] = {}
    promised: dict[str, tuple[str, dict[str, Any]]] = {}
    for number, function in functions:
        schemas[function.name] = None
        if function.parameters is not None and (required or function.strict):
            place = f"tools[{number}].function.parameters"
            found = served_schema(function.parameters, place, style)
            schemas[function.name] = found.schema
            if found.wider:
                promised[function.name] = place, function.parameters
    single = isinstance(request.tool_choice, NamedToolChoice)
    parallel = not single and request.parallel_tool_calls is not False
    field = "tool_choice" if required or chosen else "tools"
    return Tools(field, schemas, required, parallel, promised)


def promised_of(wanted: Wanted | None) -> dict[str, bytes]:
    """Return the schemas that answers must be checked by, with their fields, as JSON."""
    found = wanted.promised() if wanted is not None else {}
    return {name: json.dumps(one, ensure_ascii=False).encode() for name, one in found.items()}


def constrain(processor: TextProcessor, prepared: PreparedRequest, wanted: Wanted | None) -> None:
    """Set the grammar of what a request wants. Raise InvalidRequest."""
    if wanted is None:
        return
    settings, tokenizer = processor.settings, processor.tokenizer
    chat = (
        isinstance(prepared.body, ChatBody)
        and not settings.structured_outputs().enable_in_reasoning
    )
    parser = ChatOutput(settings, prepared).reasoning if chat else None
    if wanted.content is None and wanted.tools is None and not (parser and parser.may_reason):
        return  # there is no reasoning to bound
    written = Format(
        settings.reasoning_parser if chat else None,
        settings.tool_call_parser,
        parser,
        tokenizer.in_grammars,
        tokenizer.id,
    )
    with processor.checking(wanted.field):
        found = constraint(wanted, written)
    ids = [] if found.begins_after is None else [tokenizer.id(found.begins_after)]
    grammar = Grammar(source=found.source, begins_after=[id_ for id_ in ids if id_ is not None])
    prepared.sampling.grammar.CopyFrom(grammar)
