"""Answers of chats and of completions: one body, or chunks, their usage and `[DONE]`."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive

from surestep_gateway.apis.openai.choices import CompletionOutput
from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import COMMENT, AnswerSize, Pieces, event, run_whole
from surestep_gateway.generation.generation import Generation
from surestep_gateway.generation.sequence import Delta, OutputSequence, TokenUsage
from surestep_gateway.http.bodies import JsonPieces, json_pieces
from surestep_gateway.http.errors import error_body

from .choices import ChoiceBuilder, envelope


class ChoiceEvents:
    """The events of one stream.

    A failure becomes an `error` event, and `[DONE]` is left out: clients take it for success.
    """

    ping = COMMENT

    def __init__(
        self, generation: Generation, builder: ChoiceBuilder, *, force_usage: bool
    ) -> None:
        """With `force_usage` every event has the usage, asked for or not."""
        options = generation.body.stream_options
        include = bool(options and options.include_usage)
        self._generation = generation
        self._builder = builder
        self._usage_at_end = force_usage or include
        self._usage_always = force_usage or bool(
            include and options and options.continuous_usage_stats
        )
        self._head = envelope(generation, builder.chunk_name)
        self._begun = False
        self._told = self._counted(output=0)

    async def opening(self, sequence: OutputSequence) -> Pieces:
        """Return the choice that opens a sequence; the first one has what all choices share."""
        extra = {} if self._begun else await self._builder.extra()
        self._begun = True
        choice = await self._builder.opening(sequence)
        if choice is None:
            return []
        # What the sequence wrote by now comes in the chunks behind this one.
        self._told = self._counted(self._told.output, self._told.reasoning)
        first, *rest = json_pieces(self._chunk(choice) | extra)
        pieces = [b"data: " + first, *rest]
        pieces[-1] += b"\n\n"
        return pieces

    def delta(self, sequence: OutputSequence, delta: Delta) -> bytes:
        choice = self._builder.piece(sequence, delta)
        if choice is None:
            return b""
        if self._usage_always:
            self._told = dataclasses.replace(self._generation.usage)
        return event(self._chunk(choice))

    async def end(self) -> bytes:
        tail = b"data: [DONE]\n\n"
        if not self._usage_at_end:
            return tail
        return event(self._head | {"choices": [], "usage": self._generation.usage.shown()}) + tail

    async def failure(self, error: Exception) -> bytes:
        return event(error_body(error))

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        if self._usage_at_end:  # null until the last one, as OpenAI has it
            chunk["usage"] = self._told.shown() if self._usage_always else None
        return chunk

    def _counted(self, output: int, reasoning: int | None = 0) -> TokenUsage:
        """Return the counts of the prompt, with these of the output."""
        usage = self._generation.usage
        known = None if usage.reasoning is None else reasoning
        return dataclasses.replace(usage, output=output, reasoning=known)


async def json_answer(
    generation: Generation, builder: ChoiceBuilder, receive: Receive, gateway: Gateway
) -> Response:
    """Run to the end and respond with one body of choices. Raise SurestepError."""
    gathered: dict[int, CompletionOutput] = {}
    size = AnswerSize(gateway)

    async def emit(sequence: OutputSequence, delta: Delta) -> None:
        output = gathered.get(sequence.index)
        if output is None:
            output = gathered[sequence.index] = CompletionOutput(await builder.before(sequence))
            size.grow(output.logprobs.num_bytes + len(generation.prompt_of(sequence).text or ""))
        before = output.logprobs.num_bytes
        output.add(delta, builder.logprobs(sequence, delta.logprobs))
        size.grow(len(delta.text) + output.logprobs.num_bytes - before)

    async def finish() -> list[bytes | bytearray]:
        return await _whole_answer(generation, builder, gathered)

    pieces = await run_whole(generation, emit, finish, receive, gateway)
    return JsonPieces(pieces, gateway.answers)


async def _whole_answer(
    generation: Generation, builder: ChoiceBuilder, gathered: dict[int, CompletionOutput]
) -> list[bytes | bytearray]:
    """Return the response in pieces, one choice at a time, so that other tasks can run."""
    pieces: list[bytes | bytearray] = [orjson.dumps(envelope(generation, builder.name))[:-1]]
    pieces.append(b',"choices":[')
    for sequence in generation.sequences:
        if sequence.index:
            pieces.append(b",")
        pieces += json_pieces(await builder.whole(sequence, gathered.pop(sequence.index)))
        await asyncio.sleep(0)
    first, *rest = json_pieces({"usage": generation.usage.shown()} | await builder.extra())
    return [*pieces, b"],", first[1:], *rest]
