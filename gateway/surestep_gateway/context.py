"""The objects that endpoints share: those of each model, and those of the server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from surestep_common.errors import MissingParameter, ModelNotFound, PermissionDenied, Unavailable
from surestep_common.tracing import Tracer
from surestep_proto.worker_pb2 import Adapter

from surestep_gateway.http.bodies import Answers

from .api_keys import Caller
from .http.admission import Admission, Seats
from .observability.metrics import GatewayMetrics, ModelMetrics
from .schedulers.pool import SchedulerPool
from .schedulers.scheduler_client import RETRY_AFTER_S, SchedulerClient
from .settings.config import GatewaySettings
from .text.pool import TextPool
from .text.service import TextService
from .text.tokenizer import Tokenizer

_SHOWN_NAMES = 8  # in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A model, as its requests see it."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    text: TextService
    pool: SchedulerPool
    requests: ModelMetrics
    seats: Seats
    # All models have these in common:
    metrics: GatewayMetrics
    admission: Admission
    answers: Answers
    seeds: random.Random  # of requests that bring none
    tracer: Tracer
    text_pool: TextPool

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.settings.model_names[0]

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters that may be asked for in its place, by name."""
        return self.pool.adapters

    @property
    def loads_adapters(self) -> bool:
        """Return whether any name may be that of an adapter."""
        return self.pool.is_known and self.pool.info.loads_adapters


@dataclass(frozen=True)
class Models:
    """The models behind one URL, at least one."""

    all: Sequence[Gateway]
    _by_name: dict[str, Gateway] = field(init=False)

    def __post_init__(self) -> None:
        names = {name: one for one in self.all for name in one.settings.model_names}
        object.__setattr__(self, "_by_name", names)

    @property
    def first(self) -> Gateway:
        """The first model, for what all have in common."""
        return self.all[0]

    @property
    def names(self) -> list[str]:
        """All names that requests may use."""
        return list(self._by_name)

    @property
    def schedulers(self) -> list[tuple[Gateway, SchedulerClient]]:
        """The schedulers of all models, each with what it belongs to."""
        return [(one, scheduler) for one in self.all for scheduler in one.pool.schedulers]

    def check_well(self) -> None:
        """Raise Unavailable if no model was served for longer than open requests wait for it."""
        if not any(one.pool.is_well(one.settings.resume_timeout_s) for one in self.all):
            message = f"the model is not ready{self.first.pool.trouble}"
            raise Unavailable(message, retry_after=RETRY_AFTER_S)

    def named(self, name: str) -> Gateway:
        """Return the model of this name, or that of an adapter. Raise ModelNotFound."""
        found = self._by_name.get(name)
        if found is None:
            found = next((one for one in self.all if name in one.adapters), None)
        if found is None:
            raise ModelNotFound(f"the model '{name}' does not exist", param="model")
        return found

    def permit(self, name: str, caller: Caller) -> None:
        """Raise PermissionDenied for what may be an adapter that the caller's key may not name."""
        if name not in self._by_name and not caller.may_name(name):
            raise PermissionDenied("this key's requests may not name this adapter", param="model")

    def answering(self, name: str, caller: Caller) -> Gateway:
        """Return what answers a caller's requests with this name, which may be that of an adapter
        that has to be loaded first. Raise ModelNotFound, PermissionDenied."""
        self.permit(name, caller)
        try:
            return self.named(name)
        except ModelNotFound:
            found = next((one for one in self.all if one.loads_adapters), None)
            if found is None:
                raise
            return found

    def unnamed(self) -> Gateway:
        """Return the only model. Raise MissingParameter where there are several."""
        if len(self.all) > 1:
            names = ", ".join(one.name for one in self.all[:_SHOWN_NAMES])
            raise MissingParameter(f"'model' is required here: {names}", param="model")
        return self.first
