"""Scores of pairs of texts: the cosine of their embeddings, or what a judge says; as vLLM."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive

from surestep_gateway.context import Gateway
from surestep_gateway.generation.generation import Origin
from surestep_gateway.http.bodies import JsonPieces

from .answer import Embedding, Vector
from .config import EmbeddingConfig
from .score_inputs import PreparedScores

Json = dict[str, Any]


class Scoring:
    """A request to compare texts that has passed every check, ready to run."""

    def __init__(
        self,
        gateway: Gateway,
        config: EmbeddingConfig,
        prepared: PreparedScores,
        origin: Origin,
        deadline: float,
    ) -> None:
        """`deadline` is on the event loop's clock. Raise SurestepError."""
        self._gateway, self._prepared = gateway, prepared
        self._embedding = Embedding(gateway, config, prepared.inputs, origin, deadline)

    @property
    def id(self) -> str:
        """The name in the log."""
        return self._embedding.id

    async def answer(self, receive: Receive) -> Response:
        """Run to the end and return the response. Raise SurestepError."""
        vectors = await self._embedding.vectors(receive)
        written = await asyncio.to_thread(self._written, vectors)  # there may be thousands
        return JsonPieces([written], self._gateway.answers)

    def _written(self, vectors: Sequence[Vector]) -> bytes:
        pairs = self._prepared.pairs
        if pairs is not None:
            scores = _cosines(vectors, pairs)
        else:
            as_logits = self._prepared.inputs.body.use_activation is False
            scores = [_judgement(logits, as_logit=as_logits) for logits in vectors]
        ranked = self._prepared.top_n is not None
        content = self._ranking(scores) if ranked else self._list(scores)
        about = {"model": self._embedding.model, "usage": self._embedding.usage}
        return orjson.dumps(content | about)

    def _list(self, scores: Sequence[float]) -> Json:
        data = [{"object": "score", "index": n, "score": one} for n, one in enumerate(scores)]
        head = {"id": self.id.replace("embd", "score"), "object": "list"}
        return head | {"created": int(time.time()), "data": data}

    def _ranking(self, scores: Sequence[float]) -> Json:
        documents, top_n = self._prepared.documents, self._prepared.top_n
        best = sorted(range(len(scores)), key=lambda n: -scores[n])[:top_n]
        results: list[Json] = [{"index": n, "relevance_score": scores[n]} for n in best]
        if documents is not None:
            results = [one | {"document": {"text": documents[one["index"]]}} for one in results]
        return {"id": self.id.replace("embd", "rerank"), "results": results}


def _judgement(logits: Vector, *, as_logit: bool) -> float:
    """Return the probability of yes, against no where the judge says no as well; or its logit."""
    *against, yes = logits.astype(np.float64).tolist()
    logit = yes - sum(against)
    return logit if as_logit else 0.5 * (1.0 + math.tanh(0.5 * logit))  # the logistic function


def _cosines(vectors: Sequence[Vector], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine of the angle of each pair, 0 where a vector has no direction."""
    wide = [vector.astype(np.float64) for vector in vectors]
    norms = [np.linalg.norm(vector) for vector in wide]
    products = [float(norms[one] * norms[other]) for one, other in pairs]
    return [
        float(wide[one] @ wide[other]) / lengths if lengths else 0.0
        for (one, other), lengths in zip(pairs, products, strict=True)
    ]
