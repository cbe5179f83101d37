"""The objects that all endpoints share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from surestep_common.tracing import Tracer

from surestep_gateway.apis.responses.running import Running
from surestep_gateway.apis.responses.store import Store
from surestep_gateway.http.admission import Admission
from surestep_gateway.http.answers import Answers
from surestep_gateway.observability.metrics import GatewayMetrics
from surestep_gateway.schedulers.pool import SchedulerPool
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.embeddings import EmbeddingConfig
from surestep_gateway.text.service import TextService
from surestep_gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    settings: GatewaySettings
    embedding: EmbeddingConfig
    tokenizer: Tokenizer
    text: TextService
    pool: SchedulerPool
    metrics: GatewayMetrics
    admission: Admission
    answers: Answers
    store: Store  # of responses
    running: Running
    seeds: random.Random  # of requests that bring none
    tracer: Tracer
