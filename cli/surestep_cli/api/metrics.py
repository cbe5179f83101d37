"""The metrics of a running server, parsed from Prometheus text, and what they say of drafts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from surestep_common.errors import Unavailable


class Metrics:
    """The samples of one scrape. Raise Unavailable when the text is not Prometheus text."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            raise Unavailable(f"/metrics is no text for Prometheus: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def total(self, name: str) -> float:
        """Return the sum over the samples of a name; 0 without any."""
        return sum(value for _, value in self._samples.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the values of a label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name, ()):
            sums[labels.get(label, "")] += value
        return dict(sums)


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
