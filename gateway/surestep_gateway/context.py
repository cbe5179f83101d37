"""What the endpoints share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from surestep_common.tracing import Tracer

from .admission import Admission
from .answers import Answers
from .config import GatewaySettings
from .embedding_config import EmbeddingConfig
from .metrics import Metrics
from .pool import SchedulerPool
from .text_service import TextService
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway."""

    settings: GatewaySettings
    embedding: EmbeddingConfig
    tokenizer: Tokenizer
    text: TextService
    pool: SchedulerPool
    metrics: Metrics
    admission: Admission
    answers: Answers
    seeds: random.Random  # of requests that bring none
    tracer: Tracer
