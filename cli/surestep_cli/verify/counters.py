"""Counters of the server under test, across schedulers that begin again at 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from surestep_common.errors import SurestepError

from surestep_cli.api.metrics import DraftStats, Metrics
from surestep_cli.api.sessions import get_text

_TOTALS = {
    "windows": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "surestep:preemptions_total",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_CHECKS, _RESTARTS = "surestep:ledger_checks_total", "surestep:worker_restarts_total"


@dataclass(frozen=True, slots=True)
class Counts:
    """Differences between two readings."""

    drafts: DraftStats = field(default_factory=DraftStats)
    preemptions: int = 0
    rows: int = 0  # of results, held against the scheduler's ledger
    digests: int = 0  # of ranks, held against rank 0's
    mismatches: int = 0  # rows or digests that did not fit

    @classmethod
    def of(cls, values: Mapping[str, int]) -> Counts:
        """Sort the values by name."""
        places = sum(name.startswith("position ") for name in values)
        return cls(
            DraftStats(
                values.get("windows", 0),
                values.get("drafted", 0),
                values.get("accepted", 0),
                tuple(values.get(f"position {i}", 0) for i in range(places)),
            ),
            *(values.get(name, 0) for name in ("preemptions", "rows", "digests", "mismatches")),
        )


class Meter:
    """Reads /metrics between the cases."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._last: dict[str, int] = {}
        self._total: Counter[str] = Counter()

    @property
    def total(self) -> Counts:
        """Everything between the first and the last reading."""
        return Counts.of(self._total)

    async def lap(self) -> Counts:
        """Return what was counted since the last reading; zeros where there are no metrics."""
        try:
            now = _read(Metrics(await get_text(self._session, "metrics")))
        except SurestepError:
            return Counts()
        first = not self._last
        gained = {name: _gain(value, self._last.get(name, 0)) for name, value in now.items()}
        self._last |= now
        if first:
            return Counts()
        self._total.update(gained)
        return Counts.of(gained)


def _gain(now: int, before: int) -> int:
    """Return the growth of a counter; one that has become smaller began at 0 again."""
    return now - before if now >= before else now


def _read(metrics: Metrics) -> dict[str, int]:
    found = {name: metrics.total(full) for name, full in _TOTALS.items() if full in metrics}
    found |= {f"position {k}": v for k, v in metrics.by(_PER_POSITION, "position").items()}
    found |= metrics.by(_CHECKS, "kind")
    causes = metrics.by(_RESTARTS, "cause")
    found["mismatches"] = causes.get("ledger", 0) + causes.get("digest", 0)
    return {name: int(value) for name, value in found.items()}
