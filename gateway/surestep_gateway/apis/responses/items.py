"""Items of the Responses API: what a request's input and a response's output are lists of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from surestep_common.errors import NotFound

from surestep_gateway.apis.conversation import INSTRUCTING, Conversation, Json
from surestep_gateway.request.protocol import Body, Name, unsupported
from surestep_gateway.request.render import result_part, text_part

from .tools import SEARCH, Offer, Tool, Tools, arguments_of, chat_name, found_tools

_PREFIXES = {
    "message": "msg",
    "agent_message": "am",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    # The work of others' servers, and what only these can read: not in the prompt.
    "web_search_call": "ws",
    "file_search_call": "fs",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "mcp_list_tools": "mcpl",
    "compaction": "cmp",
}
_OWN_ID = re.compile(rf"(?:{'|'.join(_PREFIXES.values())})_([0-9a-f]{{32}})[0-9a-f]{{4}}")

Part = dict[str, Any]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Body):
    """A message; an earlier answer has the role `assistant`."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class ReasoningItem(Body):
    """Reasoning of an earlier answer: its text, or else its summary."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class AgentMessageItem(Body):
    """A message of another agent, for the one that is asked."""

    type: Literal["agent_message"]
    content: str | Parts


class CallItem(Body):
    """A call of an earlier answer; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: str | None = None


class CustomCallItem(Body):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    namespace: str | None = None


class SearchCallItem(Body):
    """A search for tools, run by the client."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: Any = None


class SearchOutputItem(Body):
    """The tools that a search has found, which are on offer from here on."""

    type: Literal["tool_search_output"]
    call_id: str | None = None
    tools: Tools | None = None


class AdditionalToolsItem(Body):
    """More tools, as if they were among the request's."""

    type: Literal["additional_tools"]
    tools: Tools


class ShellCallItem(Body):
    """A command of an earlier answer, run by the client."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    id: str | None = None
    action: dict[str, Any]


class OutputItem(Body):
    """Output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = None
    id: str | None = None  # of the call, where a shell's output has nothing else
    output: str | Parts


class UnreadItem(Body):
    """Work of another server: it is kept with the conversation, and not in the prompt."""

    type: Literal[
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "compaction",
    ]


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Name


def _kind(item: Any) -> str:
    """Return which kind an item is of; messages and references need not say it."""
    if not isinstance(item, dict):
        return "<message>"
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    return f"<{kind}>"


def _tag(item: Any) -> str:
    """Return which model reads an item."""
    kind = _kind(item)
    if kind[1:-1] in _OUTPUTS:
        return "<output>"
    return "<unread>" if kind[1:-1] in _UNREAD else kind


def _known(item: Any) -> Any:
    """Raise for an item whose type is not served."""
    kind = _kind(item)
    if kind not in _TAGS:
        raise unsupported("no items of type '{kind}'", kind[1:-1])
    return item


_UNREAD = frozenset(get_args(UnreadItem.model_fields["type"].annotation))
_OUTPUTS = frozenset(get_args(OutputItem.model_fields["type"].annotation))
_TAGS = {f"<{kind}>" for kind in (*_PREFIXES, "item_reference")}
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[AgentMessageItem, Tag("<agent_message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[SearchCallItem, Tag("<tool_search_call>")]
    | Annotated[SearchOutputItem, Tag("<tool_search_output>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ShellCallItem, Tag("<local_shell_call>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[UnreadItem, Tag("<unread>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_tag),
]
CheckedItem = Annotated[Item, BeforeValidator(_known)]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def response_of(item_id: str) -> str | None:
    """Return the id of the response that has an item; None for an id that is none of ours."""
    found = _OWN_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def item_id(kind: str, token: str, place: int) -> str:
    """Return the id of the item at a place of the conversation that a response belongs to.

    `token` is what is random in the response's id.
    """
    return f"{_PREFIXES[kind]}_{token}{place:04x}"


def resolved(
    items: Sequence[Item], history: Sequence[Json], records: Mapping[str, Json]
) -> list[Item]:
    """Return the conversation: the items of `history`, then the request's, references followed.

    `records` has the stored responses by their ids. Raise NotFound.
    """
    conversation = _ITEMS.validate_python(history)
    for number, item in enumerate(items):
        if isinstance(item, ItemReference):
            found = _referenced(item.id, records)
            if found is None:
                param = f"input[{number}]"
                raise NotFound(f"{param}: no item with the id '{item.id}' is stored", param=param)
            conversation += _ITEMS.validate_python([found])
        else:
            conversation.append(item)
    return conversation


def _referenced(wanted: str, records: Mapping[str, Json]) -> Json | None:
    record = records.get(response_of(wanted) or "")
    items = [*record["items"], *record["response"]["output"]] if record is not None else []
    return next((item for item in items if item.get("id") == wanted), None)


def stored_items(conversation: Iterable[Item], token: str) -> list[Json]:
    """Return the items of a conversation as they are stored, each with an id."""
    return [_stored(item, token, place) for place, item in enumerate(conversation)]


def _stored(item: Item, token: str, place: int) -> Json:
    shown = item.model_dump(exclude_none=True)
    kind: str = shown["type"]
    if kind == "message" and isinstance(shown["content"], str):
        said = "output_text" if shown["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": said, "text": shown["content"]}]
    return {"id": item_id(kind, token, place), "status": "completed"} | shown


def messages_of(instructions: str | None, items: Sequence[Item], first: int) -> list[Json]:
    """Return the messages of a chat. Raise InvalidRequest for parts that are no text.

    `first` is the place of the request's own items, as errors number them.
    """
    conversation = Conversation()
    if instructions:
        conversation.instruct(instructions)
    for number, item in enumerate(items):
        _add(item, f"input[{max(0, number - first)}]", conversation)
    return conversation.messages


def offered(tools: Iterable[Tool], items: Sequence[Item], first: int) -> Offer:
    """Return the tools of a request and of its items. Raise InvalidRequest."""
    offer = Offer()
    offer.add(tools, "tools")
    for number, item in enumerate(items):
        if isinstance(item, AdditionalToolsItem | SearchOutputItem):
            offer.add(item.tools or (), f"input[{max(0, number - first)}].tools")
    return offer


def _add(item: Item, place: str, conversation: Conversation) -> None:
    match item:
        case MessageItem(role="assistant", content=content):
            conversation.answer(_text(content, f"{place}.content"))
        case MessageItem(role=role, content=content) if role in INSTRUCTING:
            conversation.instruct(_text(content, f"{place}.content"))
        case MessageItem(role=role, content=content):
            if role != "user" or not conversation.after_result:
                _text(content, f"{place}.content")  # refuses pictures
            conversation.say(role, content)
        case ReasoningItem(content=content, summary=summary):
            thought = [part.get("text") for part in content or summary or ()]
            text = "\n".join(part for part in thought if isinstance(part, str))
            if text:
                conversation.think(text)
        case AgentMessageItem(content=content):
            conversation.say("user", _all_text(content))
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            conversation.call(call_id, chat_name(item.namespace, name), arguments)
        case CustomCallItem(call_id=call_id, name=name, input=text):
            conversation.call(call_id, chat_name(item.namespace, name), arguments_of(text))
        case SearchCallItem(arguments=arguments):
            given = arguments if isinstance(arguments, dict) else {"query": arguments}
            conversation.call(item.call_id or "", SEARCH, given)
        case SearchOutputItem(tools=tools):
            conversation.result(item.call_id or "", found_tools(tools or ()))
        case ShellCallItem(action=action):
            conversation.call(item.call_id or item.id or "", "local_shell", action)
        case OutputItem(output=output):
            conversation.result(item.call_id or item.id or "", _all_text(output))


def _all_text(content: str | list[Part]) -> str:
    """Return text, and what was left out: nothing is refused that no client can take back."""
    return content if isinstance(content, str) else "\n".join(map(result_part, content))


def _text(content: str | list[Part], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text_part(part, f"{place}[{n}]") for n, part in enumerate(content))
