"""The endpoint that takes requests of any kind."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from surestep_gateway.apis.embeddings.body import EmbeddingRequest, RerankRequest, ScoreRequest
from surestep_gateway.apis.embeddings.job import EMBEDDING, RERANK, SCORE
from surestep_gateway.apis.embeddings.routes import EmbeddingRoutes
from surestep_gateway.apis.openai.job import CHAT, COMPLETION
from surestep_gateway.apis.openai.routes import OpenAIRoutes
from surestep_gateway.apis.requests import deadline_of, model_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description
from surestep_gateway.context import Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest

from .job import INVOCATION

_INVOCATIONS = Description(
    summary="Answer a request of one of these kinds, for SageMaker.",
    bodies=(ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    streams=True,
    errors=COUNTED_ERRORS,
)


class InvocationRoutes:
    def __init__(self, models: Models, texts: OpenAIRoutes, vectors: EmbeddingRoutes) -> None:
        """Requests are answered as `texts` and `vectors` answer theirs."""
        self._models = models
        self._answers: dict[bytes, Callable[..., Awaitable[Response]]] = {
            CHAT.name: texts.answer_chat,
            COMPLETION.name: texts.answer_completion,
            EMBEDDING.name: vectors.answer_embedding,
            SCORE.name: vectors.answer_scores,
            RERANK.name: vectors.answer_scores,
        }

    def routes(self) -> list[RuledRoute]:
        return [
            DescribedRoute(
                "POST",
                "/invocations",
                self.invocations,
                _INVOCATIONS,
                access=Access.CLIENTS,
                counted=True,
            )
        ]

    async def invocations(self, request: Request) -> Response:
        """POST /invocations"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        invoked = await prepare(gateway, INVOCATION, request, deadline)
        answer = self._answers[invoked.kind]
        return await answer(gateway, request, invoked.prepared, arrived, deadline)
