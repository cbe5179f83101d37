"""The OpenAI endpoints, with vLLM's for tokens, and the answers of chats and completions.

An answer is one body, or chunks, their usage and `[DONE]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive
from surestep_common.request_params import shown
from surestep_proto.worker_pb2 import Adapter

from surestep_gateway.api_keys import Caller
from surestep_gateway.apis.openai.choices import (
    ChatChoices,
    ChoiceBuilder,
    CompletionChoices,
    CompletionOutput,
    envelope,
)
from surestep_gateway.apis.openai.job import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    TOKENIZE,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from surestep_gateway.apis.openai.token_choices import TokenChoices
from surestep_gateway.apis.openai.tokens import (
    GENERATE,
    RENDER_CHAT,
    RENDER_COMPLETION,
    GenerateBody,
)
from surestep_gateway.apis.requests import deadline_of, model_of, origin_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description
from surestep_gateway.context import Gateway, Models
from surestep_gateway.generation.event_stream import (
    COMMENT,
    AnswerSize,
    EventStream,
    Pieces,
    event,
    run_whole,
)
from surestep_gateway.generation.generation import (
    Generation,
    chat_generation,
    completion_generation,
)
from surestep_gateway.generation.request_records import log_request
from surestep_gateway.generation.sequence import Delta, OutputSequence, TokenUsage
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.bodies import JsonPieces, json_pieces
from surestep_gateway.http.errors import JsonResponse, error_body
from surestep_gateway.request.prepared import PreparedRequest
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest
from surestep_gateway.text.service import Job

_CHAT = Description(
    summary="Answer a chat.",
    bodies=(ChatRequest,),
    streams=True,
    errors=COUNTED_ERRORS,
)
_COMPLETION = Description(
    summary="Go on with a text.",
    bodies=(CompletionRequest,),
    streams=True,
    errors=COUNTED_ERRORS,
)
_GENERATE = Description(
    summary="Go on with tokens.", bodies=(GenerateBody,), streams=True, errors=COUNTED_ERRORS
)
_RENDER_CHAT = Description(
    summary="Tokens and parameters of a chat.", bodies=(ChatRequest,), errors=COUNTED_ERRORS
)
_RENDER_COMPLETION = Description(
    summary="Tokens and parameters of a completion.",
    bodies=(CompletionRequest,),
    errors=COUNTED_ERRORS,
)
_MODELS = Description(summary="Served names.", errors=(401, 503))
_TOKENIZE = Description(
    summary="Tokens of a text or a chat.",
    bodies=(TokenizeBody, TokenizeChatBody),
    errors=COUNTED_ERRORS,
)
_DETOKENIZE = Description(
    summary="Text of tokens.", bodies=(DetokenizeBody,), errors=COUNTED_ERRORS
)


class OpenAIRoutes:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._created = int(time.time())

    def routes(self) -> list[RuledRoute]:
        counted = partial(DescribedRoute, access=Access.CLIENTS, counted=True)
        at_once = partial(DescribedRoute, access=Access.CLIENTS, counted=False)
        model = RuledRoute(
            "/v1/models/{model:path}",
            self.model,
            methods=["GET"],
            access=Access.CLIENTS,
            counted=False,
        )
        return [
            counted("POST", "/v1/chat/completions", self.chat, _CHAT),
            counted("POST", "/v1/completions", self.completions, _COMPLETION),
            at_once("GET", "/v1/models", self.models, _MODELS),
            model,
            counted("POST", "/inference/v1/generate", self.generate, _GENERATE),
            counted("POST", "/v1/chat/completions/render", self.render_chat, _RENDER_CHAT),
            counted("POST", "/v1/completions/render", self.render_completion, _RENDER_COMPLETION),
            counted("POST", "/tokenize", self.tokenize, _TOKENIZE),
            counted("POST", "/detokenize", self.detokenize, _DETOKENIZE),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        prepared = await prepare(gateway, CHAT, request, deadline)
        return await self.answer_chat(gateway, request, prepared, arrived, deadline)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        prepared = await prepare(gateway, COMPLETION, request, deadline)
        return await self.answer_completion(gateway, request, prepared, arrived, deadline)

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        prepared = await prepare(gateway, GENERATE, request, deadline)
        origin = origin_of(request, prepared.body, arrived)
        generation = await completion_generation(gateway, prepared, origin, deadline)
        return await _answer(gateway, request, generation, TokenChoices(gateway, generation))

    async def answer_chat(
        self,
        gateway: Gateway,
        request: Request,
        prepared: PreparedRequest,
        arrived: float,
        deadline: float,
    ) -> Response:
        """Answer a chat that has been prepared."""
        origin = origin_of(request, prepared.body, arrived)
        generation = await chat_generation(gateway, prepared, origin, deadline)
        return await _answer(gateway, request, generation, ChatChoices(gateway, generation))

    async def answer_completion(
        self,
        gateway: Gateway,
        request: Request,
        prepared: PreparedRequest,
        arrived: float,
        deadline: float,
    ) -> Response:
        """Answer a completion that has been prepared."""
        origin = origin_of(request, prepared.body, arrived)
        generation = await completion_generation(gateway, prepared, origin, deadline)
        return await _answer(gateway, request, generation, CompletionChoices(gateway, generation))

    async def _answer_with(self, job: Job[bytes], request: Request) -> Response:
        gateway = await model_of(self._models, request)
        answer = await prepare(gateway, job, request, deadline_of(gateway))
        return JsonPieces([answer], gateway.answers)

    async def models(self, request: Request) -> Response:
        """GET /v1/models; 503 while none can be asked, which readiness probes rely on."""
        self._models.check_well()
        if not any(one.pool.is_known or one.pool.comes_and_goes for one in self._models.all):
            _ = self._models.first.pool.info  # which raises
        caller = Caller.of(request.scope)
        cards = [self._card(name) for name in self._models.names]
        for one in self._models.all:
            mine = (adapter for name, adapter in one.adapters.items() if caller.may_name(name))
            cards += [self._adapter_card(one, adapter) for adapter in mine]
        return JsonResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["model"]
        self._models.permit(name, Caller.of(request.scope))
        gateway = self._models.named(name)
        if not (gateway.pool.is_known or gateway.pool.comes_and_goes):
            _ = gateway.pool.info  # which raises
        adapter = gateway.adapters.get(name)
        card = self._card(name) if adapter is None else self._adapter_card(gateway, adapter)
        return JsonResponse(card)

    def _adapter_card(self, gateway: Gateway, adapter: Adapter) -> dict[str, object]:
        named = {"id": adapter.name, "root": adapter.path, "parent": gateway.name}
        return self._card(gateway.name) | named

    def _card(self, name: str) -> dict[str, object]:
        """Describe a model, with what is known of one that has not been loaded yet."""
        gateway = self._models.named(name)
        info = gateway.pool.info if gateway.pool.is_known else None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "surestep",
            "root": (info and info.model_path) or str(gateway.settings.model),
            "parent": None,
            "max_model_len": info and info.max_model_len,
            "default_sampling_params": info and shown(info.defaults),
            "status": {"value": gateway.pool.residence},
        }

    async def render_chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/render"""
        return await self._answer_with(RENDER_CHAT, request)

    async def render_completion(self, request: Request) -> Response:
        """POST /v1/completions/render"""
        return await self._answer_with(RENDER_COMPLETION, request)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        return await self._answer_with(TOKENIZE, request)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        return await self._answer_with(DETOKENIZE, request)


async def _answer(
    gateway: Gateway, request: Request, generation: Generation, builder: ChoiceBuilder
) -> Response:
    log_request(gateway, generation)
    if generation.body.stream:
        force = gateway.settings.enable_force_include_usage
        return EventStream(
            gateway, generation, ChoiceEvents(generation, builder, force_usage=force)
        )
    return await json_answer(generation, builder, request.receive, gateway)


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
        self._head = envelope(generation, builder.chunk_name) | builder.head
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
        if delta.finish_reason is not None:
            choice |= self._generation.weights_of(sequence)
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
    return JsonPieces(pieces, gateway.answers, generation.weight_headers)


async def _whole_answer(
    generation: Generation, builder: ChoiceBuilder, gathered: dict[int, CompletionOutput]
) -> list[bytes | bytearray]:
    """Return the response in pieces, one choice at a time, so that other tasks can run."""
    head = envelope(generation, builder.name) | builder.head
    pieces: list[bytes | bytearray] = [orjson.dumps(head)[:-1]]
    pieces.append(b',"choices":[')
    for sequence in generation.sequences:
        if sequence.index:
            pieces.append(b",")
        choice = await builder.whole(sequence, gathered.pop(sequence.index))
        pieces += json_pieces(choice | generation.weights_of(sequence))
        await asyncio.sleep(0)
    first, *rest = json_pieces({"usage": generation.usage.shown()} | await builder.extra())
    return [*pieces, b"],", first[1:], *rest]
