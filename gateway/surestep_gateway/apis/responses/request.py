"""Requests of the Responses API, prepared as chats."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic_core import from_json
from surestep_common.errors import InvalidRequest, NotFound, PreviousNotFound
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.apis.conversation import Json, shared_fields
from surestep_gateway.request.parse import parse, parse_fields, refuse_in_responses, renamed
from surestep_gateway.request.prepare import draft_chat_request
from surestep_gateway.request.prepared import PreparedRequest, dump_prepared, load_prepared
from surestep_gateway.request.protocol import ChatRequest, json_text
from surestep_gateway.text.service import Draft, Job, TextProcessor
from surestep_gateway.text.tokenizer import Texts
from surestep_gateway.text.wire import Parts, framed, unframed

from .body import ResponseRequest, TextFormat
from .items import (
    Item,
    ItemReference,
    MessageItem,
    messages_of,
    offered,
    resolved,
    response_of,
    stored_items,
)
from .tools import Called, Offer, chat_tool_choice, is_left_out

MAX_REFERENCED = 256  # stored responses that one request goes on from or refers to

# How names of fields of the chat begin that a request becomes, and what clients call them.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
_SHOWN = {  # of a request, in its response
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
    "truncation",
    "user",
    "temperature",
    "top_p",
    "safety_identifier",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """A request that is ready to run, or that needs stored responses before it is."""

    wanted: Sequence[str] = ()  # ids of these
    token: str = ""  # what is random in the response's id
    asked: Json  # fields of the request that its response shows, and `store`
    called: dict[str, Called] = field(default_factory=dict)  # functions that stand for more
    items: bytes = b""  # frames with the JSON of each item of the conversation so far
    num_items: int = 0
    chat: PreparedRequest | None = None


def draft_response(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedResponse]:
    """POST /v1/responses. Raise SurestepError."""
    return _draft(processor, raw, None, info)


def draft_continued(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedResponse]:
    """The same with the stored responses that it needs: `raw` is the body and they, framed."""
    body, *records = unframed(raw)
    return _draft(processor, body, records, info)


def _draft(
    processor: TextProcessor,
    raw: bytes | bytearray,
    fetched: Sequence[bytes | bytearray] | None,
    info: SchedulerInfo,
) -> Draft[PreparedResponse]:
    body = parse(ResponseRequest, raw)
    refuse_in_responses(body)
    asked = _asked(body)
    items = _items(body)
    wanted = _wanted(body, items)
    if wanted and fetched is None:
        needs = PreparedResponse(wanted=wanted, asked=asked)
        return Draft(Texts([], add_special_tokens=False), lambda _: needs)
    records = {one["response"]["id"]: one for one in map(_record, fetched or ())}
    history = _history(body.previous_response_id, records)
    conversation = resolved(items, history, records)
    messages = messages_of(body.instructions, conversation, first=len(history))
    offer = offered(body.tools or (), conversation, first=len(history))
    with _placed(offer):
        chat = draft_chat_request(processor, _chat(body, messages, offer), info)
    token = secrets.token_hex(16)
    stored = bytes(framed([json_text(one) for one in stored_items(conversation, token)]))

    def finish(encoded: Sequence[list[int]]) -> PreparedResponse:
        with _placed(offer):
            finished = chat.finish(encoded)
        return PreparedResponse(
            token=token,
            asked=asked,
            called=offer.called,
            items=stored,
            num_items=len(conversation),
            chat=finished,
        )

    return Draft(chat.texts, finish)


def _record(frames: bytes | bytearray) -> Json:
    """Return a stored response and the items that it was made from."""
    response, *items = map(from_json, unframed(frames))
    return {"response": response, "items": items}


def _items(body: ResponseRequest) -> list[Item]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def _wanted(body: ResponseRequest, items: Sequence[Item]) -> list[str]:
    """Return the ids of the stored responses that a request needs. Raise NotFound."""
    wanted = [body.previous_response_id] if body.previous_response_id is not None else []
    for number, item in enumerate(items):
        if isinstance(item, ItemReference):
            response = response_of(item.id)
            if response is None:
                param = f"input[{number}]"
                raise NotFound(f"{param}: no item with the id '{item.id}' is stored", param=param)
            wanted.append(response)
    unique = list(dict.fromkeys(wanted))
    if len(unique) > MAX_REFERENCED:
        raise InvalidRequest(
            f"input: items of {len(unique)} stored responses, more than {MAX_REFERENCED}",
            param="input",
        )
    return unique


def _history(previous: str | None, records: Mapping[str, Json]) -> list[Json]:
    """Return the items up to the end of the previous response. Raise PreviousNotFound."""
    if previous is None:
        return []
    if previous not in records:
        raise PreviousNotFound(
            f"no response with the id '{previous}' is stored", param="previous_response_id"
        )
    record = records[previous]
    return [*record["items"], *record["response"]["output"]]


@contextlib.contextmanager
def _placed(offer: Offer) -> Iterator[None]:
    """Let errors name the place of a tool where the request has it."""
    names = (rf"tools\[{n}\]\.function" for n in range(len(offer.places)))
    with renamed(dict(zip(names, offer.places.values(), strict=True))):
        yield


def _chat(body: ResponseRequest, messages: Sequence[Json], offer: Offer) -> ChatRequest:
    """Return the request as one of a chat. Raise InvalidRequest."""
    asked = _format(body.text.format if body.text else None)
    given = shared_fields(body, asked, "text.format")
    given |= {
        "messages": messages,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
        "tools": offer.chat_tools(),
        "tool_choice": chat_tool_choice(body.tool_choice, offer),
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    return parse_fields(ChatRequest, given)


def _format(asked: TextFormat | None) -> Json | None:
    if asked is None:
        return None
    given = asked.model_dump(by_alias=True, exclude_unset=True)
    if asked.type != "json_schema":
        return given
    del given["type"]
    return {"type": asked.type, "json_schema": given}


def _asked(body: ResponseRequest) -> Json:
    asked = body.model_dump(mode="json", include=_SHOWN, exclude_unset=True, by_alias=True)
    if body.tools:
        asked["tools"] = [one for one in asked["tools"] if not is_left_out(one)]
    return asked | {"store": body.store is not False}


def _dump(prepared: PreparedResponse) -> Parts:
    """Serialise a request of the Responses API."""
    about = {
        "wanted": prepared.wanted,
        "token": prepared.token,
        "asked": prepared.asked,
        "called": prepared.called,
        "num_items": prepared.num_items,
    }
    chat = [] if prepared.chat is None else dump_prepared(prepared.chat)
    return [json.dumps(about, ensure_ascii=False).encode(), prepared.items, *chat]


def _load(parts: Sequence[bytes]) -> PreparedResponse:
    about, items, *chat = parts
    loaded = load_prepared(chat) if chat else None
    fields = json.loads(about)
    fields["called"] = {name: Called(*what) for name, what in fields["called"].items()}
    return PreparedResponse(**fields, items=items, chat=loaded)


RESPONSE: Job[PreparedResponse] = Job(b"response", draft_response, _dump, _load)
CONTINUED: Job[PreparedResponse] = Job(b"continued", draft_continued, _dump, _load)
