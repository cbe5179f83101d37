"""The OpenAI endpoints and vLLM's tokenizer endpoints."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import ModelNotFound
from surestep_common.sampling_defaults import shown

from surestep_gateway.apis.embeddings.answer import Embedding
from surestep_gateway.apis.embeddings.body import EmbeddingRequest, RerankRequest, ScoreRequest
from surestep_gateway.apis.embeddings.inputs import PreparedInputs
from surestep_gateway.apis.embeddings.score_inputs import PreparedScores
from surestep_gateway.apis.embeddings.scores import Scoring
from surestep_gateway.apis.requests import deadline_of, origin_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description, RuledRoute
from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import EventStream
from surestep_gateway.generation.generation import (
    Generation,
    chat_generation,
    completion_generation,
)
from surestep_gateway.generation.request_log import log_embedding, log_request
from surestep_gateway.generation.respond import json_answer
from surestep_gateway.http.admission import Access
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.http.json_pieces import JsonPieces
from surestep_gateway.request.prompts import PreparedRequest
from surestep_gateway.request.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from surestep_gateway.text.jobs import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    INVOCATION,
    RERANK,
    SCORE,
    TOKENIZE,
    Invoked,
    Job,
)

from .choice_stream import ChoiceEvents
from .choices import ChatChoices, ChoiceBuilder, CompletionChoices

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
_EMBEDDINGS = Description(
    summary="Make vectors of texts.", bodies=(EmbeddingRequest,), errors=COUNTED_ERRORS
)
_SCORE = Description(summary="Compare texts.", bodies=(ScoreRequest,), errors=COUNTED_ERRORS)
_RERANK = Description(summary="Rank documents.", bodies=(RerankRequest,), errors=COUNTED_ERRORS)
_INVOCATIONS = Description(
    summary="Answer a request of one of these kinds, for SageMaker.",
    bodies=(ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
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

# vLLM's paths of one endpoint; Jina's and Cohere's clients know it by the last two.
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class OpenAIRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())
        self._runs: dict[bytes, Callable[..., Awaitable[Response]]] = {
            CHAT.name: self._chat,
            COMPLETION.name: self._complete,
            EMBEDDING.name: self._embed,
            SCORE.name: self._compare,
            RERANK.name: self._compare,
        }

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
            counted("POST", "/v1/embeddings", self.embeddings, _EMBEDDINGS),
            *(counted("POST", path, self.score, _SCORE) for path in SCORE_PATHS),
            *(counted("POST", path, self.rerank, _RERANK) for path in RERANK_PATHS),
            counted("POST", "/invocations", self.invocations, _INVOCATIONS),
            at_once("GET", "/v1/models", self.models, _MODELS),
            model,
            counted("POST", "/tokenize", self.tokenize, _TOKENIZE),
            counted("POST", "/detokenize", self.detokenize, _DETOKENIZE),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._serve(CHAT, request)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._serve(COMPLETION, request)

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        return await self._serve(EMBEDDING, request)

    async def score(self, request: Request) -> Response:
        """POST /v1/score"""
        return await self._serve(SCORE, request)

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank"""
        return await self._serve(RERANK, request)

    async def invocations(self, request: Request) -> Response:
        """POST /invocations"""
        return await self._serve(INVOCATION, request)

    async def _serve(self, job: Job[Any], request: Request) -> Response:
        """Prepare a request, which says what kind it is where its path does not, and run it."""
        arrived, deadline = time.perf_counter(), deadline_of(self._gateway)
        prepared, kind = await prepare(self._gateway, job, request, deadline), job.name
        if isinstance(prepared, Invoked):
            kind, prepared = prepared
        return await self._runs[kind](request, prepared, arrived, deadline)

    async def _chat(
        self, request: Request, prepared: PreparedRequest, arrived: float, deadline: float
    ) -> Response:
        origin = origin_of(request, prepared.body, arrived)
        generation = await chat_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(request, generation, ChatChoices(self._gateway, generation))

    async def _complete(
        self, request: Request, prepared: PreparedRequest, arrived: float, deadline: float
    ) -> Response:
        origin = origin_of(request, prepared.body, arrived)
        generation = await completion_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(request, generation, CompletionChoices(self._gateway, generation))

    async def _embed(
        self, request: Request, prepared: PreparedInputs, arrived: float, deadline: float
    ) -> Response:
        origin = origin_of(request, prepared.body, arrived)
        embedding = Embedding(self._gateway, prepared, origin, deadline)
        log_embedding(self._gateway, embedding.id, origin, prepared)
        return await embedding.answer(request.receive)

    async def _compare(
        self, request: Request, prepared: PreparedScores, arrived: float, deadline: float
    ) -> Response:
        origin = origin_of(request, prepared.inputs.body, arrived)
        scoring = Scoring(self._gateway, prepared, origin, deadline)
        log_embedding(self._gateway, scoring.id, origin, prepared.inputs)
        return await scoring.answer(request.receive)

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
        names = self._gateway.settings.model_names()
        return JsonResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["model"]
        if name not in self._gateway.settings.model_names():
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
