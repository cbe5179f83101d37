"""What the endpoints share."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import NotFound

from .admission import Admission
from .chat import ChatTemplate
from .config import GatewaySettings
from .metrics import Metrics
from .pool import SchedulerPool
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts of one gateway."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    template: ChatTemplate
    pool: SchedulerPool
    metrics: Metrics
    admission: Admission

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound for a model that is not served here."""
        names = self.settings.model_names()
        if name is None:
            return names[0]
        if name not in names:
            raise NotFound(f"the model '{name}' does not exist", param="model")
        return name
