"""The figures of a running server at one moment, and the rates between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surestep_cli.api.metrics import DraftStats, Metrics, draft_stats

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """Reading of a moment. `at` is of time.monotonic; counters count since the server started."""

    at: float
    status: Json  # the /status document
    prompt_tokens: float
    output_tokens: float
    steps: float
    running: float
    waiting: float
    kv_usage: float  # share of the blocks, 0 to 1
    restarts: float  # epochs that were lost
    drafts: DraftStats
    known: bool  # whether any scheduler has reported its figures

    @classmethod
    def of(cls, at: float, status: Json, metrics: Metrics) -> Moment:
        """Combine the gateway's status and metrics."""
        return cls(
            at=at,
            status=status,
            prompt_tokens=metrics.total("surestep:prompt_tokens_total"),
            output_tokens=metrics.total("surestep:generation_tokens_total"),
            steps=metrics.total("surestep:steps_total"),
            running=metrics.total("vllm:num_requests_running"),
            waiting=metrics.total("vllm:num_requests_waiting"),
            kv_usage=metrics.total("vllm:kv_cache_usage_perc"),
            restarts=metrics.total("surestep:worker_restarts_total"),
            drafts=draft_stats(metrics),
            known="surestep:generation_tokens_total" in metrics,
        )

    @property
    def speculates(self) -> bool:
        """Return whether any rank may draft, as far as ranks answer."""
        ranks = [
            rank
            for scheduler in self.status["schedulers"]
            if scheduler["status"] is not None
            for rank in scheduler["status"]["ranks"]
        ]
        return not ranks or any(rank["max_draft_tokens"] for rank in ranks)

    @property
    def state(self) -> str:
        """State of the gateway."""
        return str(self.status["gateway"]["state"])

    def ranks(self) -> tuple[int, int]:
        """Number of ready workers, and of all workers."""
        states = [
            supervisor["rank_state"]
            for scheduler in self.status["schedulers"]
            if scheduler["status"] is not None
            for supervisor in scheduler["status"]["supervisors"]
        ]
        return states.count("READY"), len(states)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second between two moments.

    Counters that fell, or that one of the moments lacks, count as nothing.
    """

    prompt_tok_s: float
    output_tok_s: float
    steps_s: float
    drafts: DraftStats  # of that time

    @classmethod
    def between(cls, earlier: Moment, later: Moment) -> Rates:
        if not (earlier.known and later.known):
            return cls(0.0, 0.0, 0.0, DraftStats())
        seconds = max(later.at - earlier.at, 1e-9)

        def rate(name: str) -> float:
            grown: float = getattr(later, name) - getattr(earlier, name)
            return max(0.0, grown) / seconds

        fallen = later.drafts.windows < earlier.drafts.windows
        return cls(
            rate("prompt_tokens"),
            rate("output_tokens"),
            rate("steps"),
            DraftStats() if fallen else later.drafts.since(earlier.drafts),
        )
