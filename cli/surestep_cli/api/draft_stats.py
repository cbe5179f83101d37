"""Statistics of drafts, from a server's metrics."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .metrics import Metrics


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Windows that had drafts, and the tokens drafted and accepted."""

    windows: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by position in the window

    def since(self, earlier: DraftStats) -> DraftStats:
        """Return the difference to an earlier reading."""
        pairs = itertools.zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)
        return DraftStats(
            self.windows - earlier.windows,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in pairs),
        )

    def rates(self) -> list[float]:
        """Return by position the share of windows in which the draft there was accepted."""
        return [count / self.windows for count in self.accepted_at] if self.windows else []


def draft_stats(metrics: Metrics) -> DraftStats:
    """Return the counters that the server exports under vLLM's names."""
    at = metrics.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    by_position = {int(position): int(count) for position, count in at.items()}
    return DraftStats(
        int(metrics.total("vllm:spec_decode_num_drafts_total")),
        int(metrics.total("vllm:spec_decode_num_draft_tokens_total")),
        int(metrics.total("vllm:spec_decode_num_accepted_tokens_total")),
        tuple(by_position.get(i, 0) for i in range(max(by_position, default=-1) + 1)),
    )
