"""The OpenAI endpoints and vLLM's tokenizer endpoints."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import ModelNotFound
from surestep_common.sampling import shown

from surestep_gateway.apis.requests import deadline_of, origin_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description, RuledRoute
from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import EventStream
from surestep_gateway.generation.generation import (
    Generation,
    chat_generation,
    completion_generation,
)
from surestep_gateway.generation.request_log import log_request
from surestep_gateway.http.admission import Access
from surestep_gateway.http.bodies import JsonPieces
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.request.prompts import PreparedRequest
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest
from surestep_gateway.text.service import Job

from .answer import ChoiceEvents, json_answer
from .choices import ChatChoices, ChoiceBuilder, CompletionChoices
from .job import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from .tokenize import DetokenizeBody, TokenizeBody, TokenizeChatBody

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
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
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
            counted("POST", "/tokenize", self.tokenize, _TOKENIZE),
            counted("POST", "/detokenize", self.detokenize, _DETOKENIZE),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        arrived, deadline = time.perf_counter(), deadline_of(self._gateway)
        prepared = await prepare(self._gateway, CHAT, request, deadline)
        return await self.answer_chat(request, prepared, arrived, deadline)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        arrived, deadline = time.perf_counter(), deadline_of(self._gateway)
        prepared = await prepare(self._gateway, COMPLETION, request, deadline)
        return await self.answer_completion(request, prepared, arrived, deadline)

    async def answer_chat(
        self, request: Request, prepared: PreparedRequest, arrived: float, deadline: float
    ) -> Response:
        """Answer a chat that has been prepared."""
        origin = origin_of(request, prepared.body, arrived)
        generation = await chat_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(request, generation, ChatChoices(self._gateway, generation))

    async def answer_completion(
        self, request: Request, prepared: PreparedRequest, arrived: float, deadline: float
    ) -> Response:
        """Answer a completion that has been prepared."""
        origin = origin_of(request, prepared.body, arrived)
        generation = await completion_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(request, generation, CompletionChoices(self._gateway, generation))

    async def _answer_with(self, job: Job[bytes], request: Request) -> Response:
        answer = await prepare(self._gateway, job, request, deadline_of(self._gateway))
        return JsonPieces([answer], self._gateway.answers)

    async def _answer(
        self, request: Request, generation: Generation, builder: ChoiceBuilder
    ) -> Response:
        log_request(self._gateway, generation)
        if generation.body.stream:
            force = self._gateway.settings.enable_force_include_usage
            events = ChoiceEvents(generation, builder, force_usage=force)
            return EventStream(self._gateway, generation, events)
        return await json_answer(generation, builder, request.receive, self._gateway)

    async def models(self, request: Request) -> Response:
        """GET /v1/models; 503 until the model is loaded, which readiness probes rely on."""
        names = self._gateway.settings.model_names
        return JsonResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["model"]
        if name not in self._gateway.settings.model_names:
            raise ModelNotFound(f"the model '{name}' does not exist", param="model")
        return JsonResponse(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        info = self._gateway.pool.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "surestep",
            "root": info.model_path or str(self._gateway.settings.model),
            "parent": None,
            "max_model_len": info.max_model_len,
            "default_sampling_params": shown(info.defaults),
        }

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        return await self._answer_with(TOKENIZE, request)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        return await self._answer_with(DETOKENIZE, request)
