"""The OpenAI endpoints and vLLM's tokenizer endpoints."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from surestep_common.errors import DeadlineExceeded, ModelNotFound
from surestep_common.sampling_defaults import shown

from surestep_gateway.auth.tenants import Caller
from surestep_gateway.context import Gateway
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.output.json_pieces import JsonPieces
from surestep_gateway.request.embedding_body import EmbeddingBody, EmbeddingRequest
from surestep_gateway.request.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
)
from surestep_gateway.request.tokenizer_bodies import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from surestep_gateway.serving.embeddings import Embedding
from surestep_gateway.serving.generation import (
    Generation,
    Origin,
    chat_generation,
    completion_generation,
)
from surestep_gateway.serving.request_log import log_request
from surestep_gateway.serving.respond import EventStream, json_answer, until_disconnect
from surestep_gateway.serving.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
)
from surestep_gateway.text_processes.jobs import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    EMBEDDING,
    TOKENIZE,
    Job,
)

from .described_route import COUNTED_ERRORS, DescribedRoute, Description
from .middleware import body_of

T = TypeVar("T")

_CHAT = Description(
    summary="Answer a chat.",
    bodies=(ChatRequest,),
    streams=True,
    keys=True,
    errors=COUNTED_ERRORS,
)
_COMPLETION = Description(
    summary="Go on with a text.",
    bodies=(CompletionRequest,),
    streams=True,
    keys=True,
    errors=COUNTED_ERRORS,
)
_EMBEDDINGS = Description(
    summary="Make vectors of texts.", bodies=(EmbeddingRequest,), keys=True, errors=COUNTED_ERRORS
)
_MODELS = Description(summary="Served names.", keys=True, errors=(401, 503))
_TOKENIZE = Description(
    summary="Tokens of a text or a chat.",
    bodies=(TokenizeBody, TokenizeChatBody),
    keys=True,
    errors=COUNTED_ERRORS,
)
_DETOKENIZE = Description(
    summary="Text of tokens.", bodies=(DetokenizeBody,), keys=True, errors=COUNTED_ERRORS
)


class OpenAIRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            DescribedRoute("POST", "/v1/chat/completions", self.chat, _CHAT),
            DescribedRoute("POST", "/v1/completions", self.completions, _COMPLETION),
            DescribedRoute("POST", "/v1/embeddings", self.embeddings, _EMBEDDINGS),
            DescribedRoute("GET", "/v1/models", self.models, _MODELS),
            Route("/v1/models/{model:path}", self.model),
            DescribedRoute("POST", "/tokenize", self.tokenize, _TOKENIZE),
            DescribedRoute("POST", "/detokenize", self.detokenize, _DETOKENIZE),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        arrived = time.perf_counter()
        deadline = self._deadline()
        prepared = await self._prepare(CHAT, request, deadline)
        origin = _origin(request, prepared.body, arrived)
        generation = await chat_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(
            request, generation, ChatResponseBuilder(self._gateway, generation)
        )

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        arrived = time.perf_counter()
        deadline = self._deadline()
        prepared = await self._prepare(COMPLETION, request, deadline)
        origin = _origin(request, prepared.body, arrived)
        generation = await completion_generation(self._gateway, prepared, origin, deadline)
        return await self._answer(
            request, generation, CompletionResponseBuilder(self._gateway, generation)
        )

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        arrived = time.perf_counter()
        deadline = self._deadline()
        prepared = await self._prepare(EMBEDDING, request, deadline)
        origin = _origin(request, prepared.body, arrived)
        embedding = Embedding(self._gateway, prepared, origin, deadline)
        log_request(self._gateway, embedding.id, origin, prepared.body, prepared.inputs)
        return await embedding.answer(request.receive)

    def _deadline(self) -> float:
        """Return the deadline of a request that arrives now, on the event loop's clock."""
        return asyncio.get_running_loop().time() + self._gateway.settings.request_timeout_s

    async def _prepare(self, job: Job[T], request: Request, deadline: float) -> T:
        """Run a preparation job on the body and release the body. Raise SurestepError."""
        gateway = self._gateway
        body, info = body_of(request), gateway.pool.info
        try:
            prepared = gateway.text.at_once(job, body.data, info)
            if prepared is not None:
                return prepared
            async with asyncio.timeout_at(deadline):
                work = gateway.text.prepare(job, body.data, info)
                return await until_disconnect(request.receive, work, gateway.admission)
        except TimeoutError:
            raise DeadlineExceeded("the request was not prepared in time") from None
        finally:
            body.release()

    async def _answer_with(self, job: Job[bytes], request: Request) -> Response:
        answer = await self._prepare(job, request, self._deadline())
        return JsonPieces([answer], self._gateway.answers)

    async def _answer(
        self, request: Request, generation: Generation, builder: ResponseBuilder
    ) -> Response:
        ids = [prompt.token_ids for prompt in generation.prompts]
        log_request(self._gateway, generation.id, generation.origin, generation.body, ids)
        if generation.body.stream:
            force = self._gateway.settings.enable_force_include_usage
            return EventStream(generation, builder, self._gateway.admission, force_usage=force)
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


def _origin(request: Request, body: GenerationBody | EmbeddingBody, arrived: float) -> Origin:
    """Return where a request came from; a request id in a header goes before one in the body."""
    state, caller = request.scope["state"], Caller.of(request.scope)
    if body.request_id is not None and not state["request_id_given"]:
        return Origin(body.request_id, arrived, caller)
    return Origin(state["request_id"], arrived, caller)
