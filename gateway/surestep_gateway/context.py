"""The objects that all endpoints share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from surestep_common.tracing import Tracer

from surestep_gateway.http.bodies import Answers

from .http.admission import Admission
from .observability.metrics import GatewayMetrics
from .schedulers.pool import SchedulerPool
from .settings.config import GatewaySettings
from .text.service import TextService
from .text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    settings: GatewaySettings
    tokenizer: Tokenizer
    text: TextService
    pool: SchedulerPool
    metrics: GatewayMetrics
    admission: Admission
    answers: Answers
    seeds: random.Random  # of requests that bring none
    tracer: Tracer
