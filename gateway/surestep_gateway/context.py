"""The objects that all endpoints share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from surestep_common.tracing import Tracer

from .config import GatewaySettings
from .embedding_config import EmbeddingConfig
from .http.admission import Admission
from .observability.metrics import GatewayMetrics
from .output.answers import Answers
from .schedulers.pool import SchedulerPool
from .stored.running import Running
from .stored.store import Store
from .text.tokenizer import Tokenizer
from .text_processes.service import TextService


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
