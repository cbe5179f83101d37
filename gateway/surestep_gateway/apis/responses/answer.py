"""Answers of the Responses API: their items, their events, and what is stored of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import orjson
from surestep_common.errors import Unavailable

from surestep_gateway.apis.conversation import Block, Blocks, Change, Closed, Kind, Opened, Written
from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import COMMENT, Interrupted, Pieces, named_event
from surestep_gateway.generation.generation import Generation
from surestep_gateway.generation.schema_check import violations_shown
from surestep_gateway.generation.sequence import Delta, OutputSequence
from surestep_gateway.http.errors import error_body
from surestep_gateway.request.protocol import CUT, json_text
from surestep_gateway.text.wire import framed

from .items import item_id
from .request import PreparedResponse
from .store import Store, key_of
from .tools import Called, input_of, shown_call

Json = dict[str, Any]

_KINDS = {Kind.REASONING: "reasoning", Kind.TEXT: "message"}  # a call's is the tool's
_TEXT_EVENTS = {
    Kind.REASONING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}
_DEFAULTS: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}


class ResponseAnswer:
    """A response while it is written, and once it is whole."""

    ping = COMMENT

    def __init__(
        self,
        gateway: Gateway,
        generation: Generation,
        prepared: PreparedResponse,
        store: Store,
    ) -> None:
        self.key = key_of(generation.origin.caller, generation.id)
        self._store = store
        self._generation = generation
        self._prepared = prepared
        self._blocks = Blocks()
        self._status = "in_progress"
        self._cut = ""  # why it is incomplete, as far as the API has a word for it
        self._error: Json | None = None
        self._stored: bool = prepared.asked["store"]
        self._num_events = 0
        self._violations: Json = {}
        defaults = gateway.pool.info.defaults
        asked = {name: value for name, value in prepared.asked.items() if value is not None}
        shaping = {"temperature": defaults.temperature, "top_p": defaults.top_p}
        self._asked = _DEFAULTS | shaping | asked

    async def opening(self, sequence: OutputSequence) -> Pieces:
        return self._created()

    def delta(self, sequence: OutputSequence, delta: Delta) -> bytes:
        """Take in one delta and return its events."""
        changes = self._blocks.add(delta.events, delta.finish_reason)
        events = [self._event(one) for change in changes for one in self._changed(change)]
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason in CUT else "completed"
            self._cut = "max_output_tokens" if delta.finish_reason == "length" else ""
            self._violations = violations_shown(delta.violations)
        return b"".join(events)

    async def end(self) -> bytes:
        return await self._end(f"response.{self._status}")

    async def failure(self, error: Exception) -> bytes:
        """Note a failure and return the events that end the stream; cancelled is incomplete."""
        opening = b"" if self._num_events else b"".join(self._created())  # clients wait for it
        if isinstance(error, Interrupted):
            return opening + await self._end("response.incomplete")
        self._status = "failed"
        shown = error_body(error)["error"]
        code = shown["code"] if shown["code"] == "rate_limit_exceeded" else "server_error"
        self._error = {"code": code, "message": shown["message"]}
        return opening + await self._end("response.failed")

    def stop(self) -> None:
        """Note that the response was cancelled."""
        self._status = "cancelled"

    async def whole(self) -> bytes:
        """Return the JSON of the response, which is over, and store it."""
        return await self._settle()

    def shown(self) -> Json:
        """Return the response as it is now."""
        generation = self._generation
        return (
            self._asked
            | self._violations
            | {
                "id": generation.id,
                "object": "response",
                "created_at": generation.created,
                "completed_at": int(time.time()) if self._status == "completed" else None,
                "status": self._status,
                "background": False,
                "error": self._error,
                "incomplete_details": {"reason": self._cut} if self._cut else None,
                "model": generation.model,
                "output": [self._item(block) for block in self._blocks.all],
                "service_tier": "default",
                "store": self._stored,
                "top_logprobs": 0,
                "usage": None if self._status == "in_progress" else self._usage(),
            }
        )

    async def _end(self, kind: str) -> bytes:
        response = orjson.Fragment(await self._settle())
        return self._event({"type": kind, "response": response})

    async def _settle(self) -> bytes:
        """Store the response if that is wanted, and return its JSON."""
        response = json_text(self.shown())
        if self._stored:
            record = framed([response]) + self._prepared.items
            self._stored = False
            with contextlib.suppress(Unavailable):  # which the log has; the answer is there
                self._stored = await self._store.put(self.key, bytes(record))
            if not self._stored:
                response = json_text(self.shown())
        return response

    def _changed(self, change: Change) -> Iterator[Json]:
        """Yield the events of a change, without their numbers."""
        block = change.block
        place = {"item_id": self._id(block), "output_index": block.index}
        is_call, name = block.kind is Kind.CALL, _TEXT_EVENTS[block.kind]
        part = place if is_call else place | {"content_index": 0}
        logprobs: Json = {"logprobs": []} if block.kind is Kind.TEXT else {}
        match change:
            case Opened():
                yield self._of_item("response.output_item.added", block)
                if not is_call:
                    yield part | {"type": "response.content_part.added", "part": _part(block)}
            case _ if is_call and self._kind(block) != "function_call":
                yield from self._special_call(change, place)
            case Written(_, text):
                yield part | logprobs | {"type": f"{name}.delta", "delta": text}
            case Closed():
                if is_call:
                    told = {"name": self._called(block).name, "arguments": block.text}
                    yield part | {"type": f"{name}.done"} | told
                else:
                    yield part | logprobs | {"type": f"{name}.done", "text": block.text}
                    yield part | {"type": "response.content_part.done", "part": _part(block)}
                yield self._of_item("response.output_item.done", block)

    def _special_call(self, change: Change, place: Json) -> Iterator[Json]:
        """Yield the events of a call whose text is not the JSON that the model writes."""
        block = change.block
        if not isinstance(change, Closed):
            return
        if self._kind(block) == "custom_tool_call":
            text = input_of(block.text)
            yield place | {"type": "response.custom_tool_call_input.delta", "delta": text}
            yield place | {"type": "response.custom_tool_call_input.done", "input": text}
        yield self._of_item("response.output_item.done", block)

    def _created(self) -> Pieces:
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def _lifecycle(self, kind: str) -> bytes:
        return self._event({"type": kind, "response": self.shown()})

    def _of_item(self, kind: str, block: Block) -> Json:
        return {"type": kind, "output_index": block.index, "item": self._item(block)}

    def _event(self, content: Json) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(content | {"sequence_number": number})

    def _called(self, block: Block) -> Called:
        return self._prepared.called.get(block.name, Called("function_call", block.name))

    def _kind(self, block: Block) -> str:
        return self._called(block).kind if block.kind is Kind.CALL else _KINDS[block.kind]

    def _id(self, block: Block) -> str:
        place = self._prepared.num_items + block.index
        return item_id(self._kind(block), self._prepared.token, place)

    def _item(self, block: Block) -> Json:
        status = "completed" if block.complete else "incomplete"
        if not block.closed and self._status == "in_progress":
            status = "in_progress"
        item: Json = {"id": self._id(block), "type": self._kind(block), "status": status}
        content = [_part(block)] if block.closed or block.text else []
        match block.kind:
            case Kind.TEXT:
                return item | {"role": "assistant", "content": content}
            case Kind.REASONING:
                return item | {"summary": [], "content": content}
            case Kind.CALL:
                call_id = f"call_{self._id(block).partition('_')[2]}"
                return item | {"call_id": call_id} | shown_call(self._called(block), block.text)

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
            "total_tokens": usage.prompt + usage.output,
        }


def _part(block: Block) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
