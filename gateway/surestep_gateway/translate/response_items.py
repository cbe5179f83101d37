"""Items of the Responses API: what a request's input and a response's output are lists of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError
from surestep_common.errors import NotFound

from surestep_gateway.request.messages import result_part, text_part
from surestep_gateway.request.protocol import UNSUPPORTED_KIND, Body, Name

from .conversation import INSTRUCTING, Conversation, Json

_SHOWN_CHARS = 32  # of an unknown type
_OWN_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})[0-9a-f]{4}")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}

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


class CallItem(Body):
    """A call of an earlier answer; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class OutputItem(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts


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


def _known(item: Any) -> Any:
    """Raise for an item whose type is not served."""
    kind = _kind(item)
    if kind not in _TAGS:
        shown = kind[1:-1][:_SHOWN_CHARS]
        raise PydanticCustomError(UNSUPPORTED_KIND, "no items of type '{kind}'", {"kind": shown})
    return item


_TAGS = {f"<{kind}>" for kind in (*_PREFIXES, "item_reference")}
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(_kind),
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


def _add(item: Item, place: str, conversation: Conversation) -> None:
    match item:
        case MessageItem(role="assistant", content=content):
            conversation.answer(_text(content, f"{place}.content"))
        case MessageItem(role=role, content=content) if role in INSTRUCTING:
            conversation.instruct(_text(content, f"{place}.content"))
        case MessageItem(role=role, content=content):
            _text(content, f"{place}.content")
            conversation.say(role, content)
        case ReasoningItem(content=content, summary=summary):
            thought = [part.get("text") for part in content or summary or ()]
            text = "\n".join(part for part in thought if isinstance(part, str))
            if text:
                conversation.think(text)
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            conversation.call(call_id, name, arguments)
        case OutputItem(call_id=call_id, output=output):
            parts = output if isinstance(output, list) else [{"text": output}]
            conversation.result(call_id, "\n".join(map(result_part, parts)))


def _text(content: str | list[Part], place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text_part(part, f"{place}[{n}]") for n, part in enumerate(content))
