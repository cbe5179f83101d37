"""What the endpoints share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .admission import Admission
from .config import GatewaySettings
from .metrics import Metrics
from .pool import SchedulerPool
from .text_service import TextService
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    text: TextService
    pool: SchedulerPool
    metrics: Metrics
    admission: Admission
    seeds: random.Random  # of requests that bring none
