"""Answers of Anthropic's Messages API: their blocks, and their events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from surestep_gateway.apis.conversation import Block, Blocks, Change, Closed, Kind, Opened
from surestep_gateway.generation.event_stream import Pieces, named_event
from surestep_gateway.generation.generation import Generation
from surestep_gateway.generation.schema_check import violations_shown
from surestep_gateway.generation.sequence import Delta, OutputSequence
from surestep_gateway.http.errors import anthropic_body

Json = dict[str, Any]

_SIGNATURE = "unsigned"  # of reasoning: clients send none back that has no signature
_UNREADABLE = "INVALID_JSON"  # key of a call's arguments that are no JSON object


class MessageAnswer:
    """Message while it is written, and once it is whole."""

    ping = named_event({"type": "ping"})

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._blocks = Blocks()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._violations: Json = {}

    async def opening(self, sequence: OutputSequence) -> Pieces:
        return [named_event({"type": "message_start", "message": self._shown(content=[])})]

    def delta(self, sequence: OutputSequence, delta: Delta) -> bytes:
        """Take in one delta and return its events."""
        changes = self._blocks.add(delta.events, delta.finish_reason)
        events = [named_event(one) for change in changes for one in self._changed(change)]
        if delta.finish_reason is not None:
            self._stop(delta)
            self._violations = violations_shown(delta.violations)
        return b"".join(events)

    async def end(self) -> bytes:
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = {"type": "message_delta", "delta": ended, "usage": self._usage()}
        return named_event(last | self._violations) + named_event({"type": "message_stop"})

    async def failure(self, error: Exception) -> bytes:
        return named_event(anthropic_body(error))

    async def whole(self) -> bytes:
        """Return the JSON of the message, which is over."""
        return orjson.dumps(
            self._shown([_whole(one, self._generation.id) for one in self._blocks.all])
        )

    def _stop(self, delta: Delta) -> None:
        match delta.finish_reason, delta.stop_reason:
            case "length", _:
                self._stop_reason = "max_tokens"
            case "abort", _:  # a client may send what there is and have it go on
                self._stop_reason = "pause_turn"
            case "tool_calls", _:
                self._stop_reason = "tool_use"
            case _, str(text):
                self._stop_reason, self._stop_sequence = "stop_sequence", text
            case _:
                self._stop_reason = "end_turn"

    def _changed(self, change: Change) -> Iterator[Json]:
        block = change.block
        place: Json = {"index": block.index}
        match change:
            case Opened():
                empty = _empty(block, self._generation.id)
                yield {"type": "content_block_start"} | place | {"content_block": empty}
            case Closed():
                if block.kind is Kind.REASONING:
                    signed = {"type": "signature_delta", "signature": _SIGNATURE}
                    yield {"type": "content_block_delta"} | place | {"delta": signed}
                yield {"type": "content_block_stop"} | place
            case _:
                delta = _delta(block.kind, change.text)
                yield {"type": "content_block_delta"} | place | {"delta": delta}

    def _shown(self, content: list[Json]) -> Json:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        } | self._violations

    def _usage(self) -> Json:
        """Return the counts; what the prefix cache had is not among the input tokens."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.output,
        }


def _call_id(block: Block, message_id: str) -> str:
    return f"toolu_{message_id.partition('_')[2]}{block.index:02x}"


def _empty(block: Block, message_id: str) -> Json:
    """Return a block as it begins."""
    match block.kind:
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.CALL:
            call_id = _call_id(block, message_id)
            return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


def _delta(kind: Kind, text: str) -> Json:
    match kind:
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: Block, message_id: str) -> Json:
    """Return a block that is over."""
    empty = _empty(block, message_id)
    match block.kind:
        case Kind.TEXT:
            return empty | {"text": block.text}
        case Kind.REASONING:
            return empty | {"thinking": block.text, "signature": _SIGNATURE}
        case Kind.CALL:
            return empty | {"input": _arguments(block.text)}


def _arguments(text: str) -> Json:
    """Return the arguments of a call, in one piece where the model got its JSON wrong."""
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {_UNREADABLE: text}
