"""Prepare inputs of embeddings and scores."""

from __future__ import annotations

import json
from collections.abc import Sequence

from surestep_proto.scheduler_pb2 import GenerateRequest

from surestep_gateway.text.service import Job
from surestep_gateway.text.wire import Parts

from .body import EmbeddingBody
from .inputs import PreparedInputs, draft_embedding
from .score_inputs import PreparedScores, draft_rerank, draft_score


def _dump_inputs(prepared: PreparedInputs) -> Parts:
    """Serialise an embedding request."""
    fields = set(EmbeddingBody.model_fields)
    body = prepared.body.model_dump_json(include=fields, exclude_none=True)
    rest = (prepared.label_ids, *prepared.inputs)
    ids = (GenerateRequest(prompt_ids=one).SerializeToString() for one in rest)
    return [body.encode(), *ids]


def _load_inputs(parts: Sequence[bytes]) -> PreparedInputs:
    body, *rest = parts
    label_ids, *inputs = (GenerateRequest.FromString(one).prompt_ids for one in rest)
    return PreparedInputs(
        body=EmbeddingBody.model_validate_json(body), inputs=inputs, label_ids=label_ids
    )


def _dump_scores(prepared: PreparedScores) -> Parts:
    """Serialise a request to compare texts."""
    about = {
        "pairs": prepared.pairs,
        "documents": prepared.documents,
        "top_n": prepared.top_n,
    }
    return [json.dumps(about).encode(), *_dump_inputs(prepared.inputs)]


def _load_scores(parts: Sequence[bytes]) -> PreparedScores:
    about, *inputs = parts
    return PreparedScores(**json.loads(about), inputs=_load_inputs(inputs))


EMBEDDING: Job[PreparedInputs] = Job(b"embedding", draft_embedding, _dump_inputs, _load_inputs)
SCORE: Job[PreparedScores] = Job(b"score", draft_score, _dump_scores, _load_scores)
RERANK: Job[PreparedScores] = Job(b"rerank", draft_rerank, _dump_scores, _load_scores)
