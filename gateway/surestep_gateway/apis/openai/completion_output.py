"""The whole output of one sequence, accumulated from its deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from surestep_gateway.generation.schema_check import Violations
from surestep_gateway.generation.sequence import Delta
from surestep_gateway.http.json_pieces import GrowingLists
from surestep_gateway.parsers import Event, coalesce, content_of

_MANY_EVENTS = 512  # are made fewer before there are more


@dataclass(slots=True)
class CompletionOutput:
    logprobs: GrowingLists
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # of the tokens, where that is wanted
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    violations: Violations | None = None

    @property
    def text(self) -> str:
        return content_of(self.events)

    def add(self, delta: Delta, logprobs: dict[str, Any] | None) -> None:
        """Append one delta, and its log-probabilities in the endpoint's format."""
        self.events.extend(delta.events)
        if len(self.events) > _MANY_EVENTS:
            self.events = coalesce(self.events)
        self.token_ids.extend(delta.token_ids)
        self.drafted.extend(delta.each_drafted)
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.violations = delta.violations
