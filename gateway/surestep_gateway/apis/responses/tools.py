"""Tools of the Responses API: what clients offer, as functions of a chat, and calls of these.

A chat has functions in one list. A namespace becomes functions whose names begin with its own, a
custom tool a function with one text. Each call is given back as the kind of item, and under the
name, that the client knows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import from_json
from surestep_common.errors import InvalidRequest

from surestep_gateway.apis.conversation import Json
from surestep_gateway.request.protocol import MAX_TOOLS, Body, Name, unsupported

logger = logging.getLogger(__name__)

# Tools that the servers of OpenAI run, or whose calls only OpenAI's models can write.
LEFT_OUT = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "tool_search",
        "computer",
        "computer_use_preview",
        "local_shell",
        "shell",
        "apply_patch",
    }
)
SEARCH = "tool_search"
_DEFAULT_NAMESPACE = "functions"  # of names without one
_INPUT = "input"  # the one argument of a custom tool
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
_NO_TOOLS: Final = "no tools of type '{kind}'"


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(Body):
    """Input format of a custom tool; the model is shown a grammar, and not held to it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class SearchTool(Body):
    """The client's own search among tools that it has not offered yet."""

    type: Literal["tool_search"]
    execution: Literal["client"]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class LeftOutTool(Body):
    """A tool that cannot be served; the model is not told of it."""

    type: str


def _type(given: Any) -> str:
    """Return the type of a tool or of a choice of one; without it a function is meant."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "function" if kind is None else str(kind)


def _kind(tool: Any) -> str:
    kind = _type(tool)
    if kind in ("function", "custom", "namespace"):
        return f"<{kind}>"
    if kind == SEARCH and (isinstance(tool, SearchTool) or _is_by_client(tool)):
        return "<search>"
    return "<left_out>" if kind in LEFT_OUT else "<unknown>"


def _is_by_client(search: Any) -> bool:
    return isinstance(search, dict) and search.get("execution") == "client"


def is_left_out(tool: Json) -> bool:
    """Return whether a tool, as it is shown, cannot be served."""
    return _kind(tool) == "<left_out>"


def _known(*kinds: str) -> BeforeValidator:
    """Return the check that a tool is of one of these kinds."""

    def check(tool: Any) -> Any:
        if isinstance(tool, dict) and _kind(tool)[1:-1] not in kinds:
            raise unsupported(_NO_TOOLS, _type(tool))
        return tool

    return BeforeValidator(check)


_Named = Annotated[
    Annotated[
        Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
        Discriminator(_kind),
    ],
    _known("function", "custom"),
]


class NamespaceTool(Body):
    """Functions and custom tools under one name, an MCP server's for example."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[_Named], Field(max_length=MAX_TOOLS, fail_fast=True)]


Tool = Annotated[
    Annotated[
        Annotated[FunctionTool, Tag("<function>")]
        | Annotated[CustomTool, Tag("<custom>")]
        | Annotated[NamespaceTool, Tag("<namespace>")]
        | Annotated[SearchTool, Tag("<search>")]
        | Annotated[LeftOutTool, Tag("<left_out>")],
        Discriminator(_kind),
    ],
    _known("function", "custom", "namespace", "search", "left_out"),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolRef(Body):
    """A tool by its name; the whole of a namespace where that is the type."""

    type: Literal["function", "custom", "namespace", "tool_search"]
    name: Name = SEARCH
    namespace: str | None = None


def _kind_of_ref(ref: Any) -> str:
    return "<left_out>" if _type(ref) in LEFT_OUT - {SEARCH} else "<ref>"


class AllowedToolRefs(Body):
    """Some of the tools; `mode` says whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[ToolRef, Tag("<ref>")] | Annotated[LeftOutTool, Tag("<left_out>")],
                Discriminator(_kind_of_ref),
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, str):
        return "<word>"
    return "<allowed_tools>" if _type(choice) == "allowed_tools" else "<tool>"


def _choosable(choice: Any) -> Any:
    """Raise for the choice of a tool that is not served."""
    kind = _type(choice)
    if kind not in ("function", "custom", "namespace", "allowed_tools", SEARCH):
        raise unsupported(_NO_TOOLS, kind)
    return choice


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ToolRef, Tag("<tool>")]
    | Annotated[AllowedToolRefs, Tag("<allowed_tools>")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_choosable),
]


class Called(NamedTuple):
    """Call of a function of the chat, as the client sees it."""

    kind: Literal["function_call", "custom_tool_call", "tool_search_call"]
    name: str
    namespace: str | None = None


def chat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool of a namespace among the functions of a chat."""
    if not namespace or namespace == _DEFAULT_NAMESPACE:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass
class Offer:
    """The functions of a chat, made of tools from several places of a request."""

    functions: dict[str, Json] = field(default_factory=dict)  # by name
    places: dict[str, str] = field(default_factory=dict)  # where the request has each of them
    called: dict[str, Called] = field(default_factory=dict)  # what is more than a function's name

    def add(self, tools: Iterable[Tool], place: str) -> None:
        """Add what can be served, and log what cannot. Raise InvalidRequest for a name's double."""
        for number, tool in enumerate(tools):
            at = f"{place}[{number}]"
            match tool:
                case NamespaceTool():
                    self._add_namespace(tool, at)
                case SearchTool():
                    shown = tool.model_dump(exclude_unset=True, exclude={"type", "execution"})
                    self._put({"name": SEARCH, **shown}, Called("tool_search_call", SEARCH), at)
                case LeftOutTool():
                    _note_left_out(tool.type)
                case _:
                    self._add_named(tool, None, at)

    def _add_namespace(self, space: NamespaceTool, place: str) -> None:
        for number, tool in enumerate(space.tools):
            self._add_named(tool, space.name, f"{place}.tools[{number}]")
        if space.tools and space.description:  # the first of its functions introduces it
            first = self.functions[chat_name(space.name, space.tools[0].name)]
            told = (space.description, first.get("description"))
            first["description"] = "\n\n".join(filter(None, told))

    def _add_named(
        self, tool: FunctionTool | CustomTool, namespace: str | None, place: str
    ) -> None:
        name = chat_name(namespace, tool.name)
        if isinstance(tool, CustomTool):
            function = {"name": name, "description": _described(tool), "parameters": _INPUT_SCHEMA}
            self._put(function, Called("custom_tool_call", tool.name, namespace), place)
            return
        function = tool.model_dump(exclude_unset=True, exclude={"type"}) | {"name": name}
        self._put(function, Called("function_call", tool.name, namespace), place)

    def _put(self, function: Json, called: Called, place: str) -> None:
        name = function["name"]
        known = self.called.get(name, Called("function_call", name))
        if name in self.functions and known != called:
            raise InvalidRequest(f"{place}: another tool is called '{name}'", param=place)
        self.functions[name], self.places[name] = function, place
        if called != Called("function_call", name):
            self.called[name] = called

    def chat_tools(self) -> list[Json] | None:
        """Return the tools of the chat."""
        return [{"type": "function", "function": one} for one in self.functions.values()] or None

    def names_of(self, ref: ToolRef) -> list[str]:
        """Return the names in the chat of a tool, or of all in a namespace."""
        if ref.type != "namespace":
            return [chat_name(ref.namespace, ref.name)]
        return [name for name, called in self.called.items() if called.namespace == ref.name]


def chat_tool_choice(choice: ToolChoice | None, offer: Offer) -> str | Json | None:
    """Return the choice as chats have it. Raise InvalidRequest."""
    if choice is None or (choice == "auto" and not offer.functions):
        return None  # clients say so without tools, too
    if isinstance(choice, str):
        return choice
    refs = choice.tools if isinstance(choice, AllowedToolRefs) else [choice]
    names = [name for ref in refs if isinstance(ref, ToolRef) for name in offer.names_of(ref)]
    if not names:
        raise InvalidRequest(
            "'tool_choice' names none of the tools that can be called here", param="tool_choice"
        )
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    if isinstance(choice, ToolRef) and choice.type != "namespace":
        return functions[0]
    mode = choice.mode if isinstance(choice, AllowedToolRefs) else "required"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def input_of(arguments: str) -> str:
    """Return the text for a custom tool, also where the model got its JSON wrong, or was cut."""
    found = _partial(arguments)
    texts = [found.get(_INPUT), *found.values()] if isinstance(found, dict) else [found]
    return next((text for text in texts if isinstance(text, str)), arguments)


def shown_call(called: Called, arguments: str) -> Json:
    """Return what the item of a call says of it: names, and what the model wrote so far."""
    if called.kind == "tool_search_call":
        return {"execution": "client", "arguments": _object(arguments)}
    space: Json = {} if called.namespace is None else {"namespace": called.namespace}
    if called.kind == "custom_tool_call":
        return {"name": called.name, "input": input_of(arguments) if arguments else ""} | space
    return {"name": called.name, "arguments": arguments} | space


def _object(arguments: str) -> Json:
    found = _partial(arguments)
    return found if isinstance(found, dict) else {}


def _partial(arguments: str) -> Any:
    """Return what JSON that may be cut says, None where it is none."""
    try:
        return from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None


def arguments_of(text: str) -> Json:
    """Return the arguments of a custom tool's call as those of its function."""
    return {_INPUT: text}


def found_tools(tools: Iterable[Tool]) -> str:
    """Return the names of tools that a search has found, as its result."""
    offer = Offer()
    offer.add(tools, "tools")
    return "\n".join(offer.functions) or "no tools"


def _described(tool: CustomTool) -> str:
    told = tool.description or ""
    if tool.format is not None and tool.format.definition:
        told += f"\n\nThe input is text of this {tool.format.syntax or ''} grammar:\n"
        told += tool.format.definition
    return told


@cache
def _note_left_out(kind: str) -> None:
    """Log it once, since agents offer the same tools with each request."""
    logger.warning("tools of type %s are left out of requests: nothing here can run them", kind)
