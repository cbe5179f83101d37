"""The endpoints that make vectors of texts, compare them and rank them."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from surestep_gateway.apis.requests import deadline_of, model_of, origin_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description
from surestep_gateway.context import Gateway, Models
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.text.service import Job

from .answer import Embedding, log_embedding
from .body import EmbeddingRequest, RerankRequest, ScoreRequest
from .config import EmbeddingConfig
from .inputs import PreparedInputs
from .job import EMBEDDING, RERANK, SCORE
from .score_inputs import PreparedScores
from .scores import Scoring

_EMBEDDINGS = Description(
    summary="Make vectors of texts.", bodies=(EmbeddingRequest,), errors=COUNTED_ERRORS
)
_SCORE = Description(summary="Compare texts.", bodies=(ScoreRequest,), errors=COUNTED_ERRORS)
_RERANK = Description(summary="Rank documents.", bodies=(RerankRequest,), errors=COUNTED_ERRORS)

# vLLM's paths of one endpoint; Jina's and Cohere's clients know it by the last two.
SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class EmbeddingRoutes:
    def __init__(self, models: Models) -> None:
        """Raise InvalidRequest for an embedding model of another kind."""
        self._models = models
        self._configs = {one.name: EmbeddingConfig.of(one.settings) for one in models.all}

    def routes(self) -> list[RuledRoute]:
        counted = partial(DescribedRoute, access=Access.CLIENTS, counted=True)
        return [
            counted("POST", "/v1/embeddings", self.embeddings, _EMBEDDINGS),
            *(counted("POST", path, self.score, _SCORE) for path in SCORE_PATHS),
            *(counted("POST", path, self.rerank, _RERANK) for path in RERANK_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        prepared = await prepare(gateway, EMBEDDING, request, deadline)
        return await self.answer_embedding(gateway, request, prepared, arrived, deadline)

    async def score(self, request: Request) -> Response:
        """POST /v1/score"""
        return await self._compare(SCORE, request)

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank"""
        return await self._compare(RERANK, request)

    async def _compare(self, job: Job[PreparedScores], request: Request) -> Response:
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        prepared = await prepare(gateway, job, request, deadline)
        return await self.answer_scores(gateway, request, prepared, arrived, deadline)

    async def answer_embedding(
        self,
        gateway: Gateway,
        request: Request,
        prepared: PreparedInputs,
        arrived: float,
        deadline: float,
    ) -> Response:
        """Answer with vectors of inputs that have been prepared."""
        origin = origin_of(request, prepared.body, arrived)
        config = self._configs[gateway.name]
        embedding = Embedding(gateway, config, prepared, origin, deadline)
        log_embedding(gateway, embedding.id, origin, prepared)
        return await embedding.answer(request.receive)

    async def answer_scores(
        self,
        gateway: Gateway,
        request: Request,
        prepared: PreparedScores,
        arrived: float,
        deadline: float,
    ) -> Response:
        """Answer with scores or a ranking of texts that have been prepared."""
        origin = origin_of(request, prepared.inputs.body, arrived)
        config = self._configs[gateway.name]
        scoring = Scoring(gateway, config, prepared, origin, deadline)
        log_embedding(gateway, scoring.id, origin, prepared.inputs)
        return await scoring.answer(request.receive)
