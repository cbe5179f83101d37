"""Totals since the start of the process."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from surestep_common.invariants import DECODE, POOL, PREFILL, PREFILL_LAST, VERIFY, IntArray

# Bounds on the tokens of a step, by which steps are counted; 0 stands for those beyond all.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 0)
MODES = {  # of rows, as metrics call them
    PREFILL: "prefill",
    PREFILL_LAST: "prefill_last",
    DECODE: "decode",
    VERIFY: "verify",
    POOL: "pool",
}


class Tally:
    """Count of each small number; index i of `counts` is for i."""

    def __init__(self) -> None:
        self.counts = np.zeros(1, dtype=np.int64)

    def add(self, values: IntArray) -> IntArray:
        """Count these numbers; return how often each of them occurs."""
        more = np.bincount(values, minlength=len(self.counts))
        if len(more) > len(self.counts):
            self.counts = np.pad(self.counts, (0, len(more) - len(self.counts)))
        self.counts += more
        return more

    def at_least(self) -> list[int]:
        """Return how often 1 or more occurred, 2 or more, and so on."""
        reached: list[int] = self.counts[:0:-1].cumsum()[::-1].tolist()
        return reached


@dataclass(slots=True)
class Counters:
    """Tokens, requests and steps; see SchedulerStats in scheduler.proto."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_loaded: int = 0  # of these, from tiers behind the pool
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    tier_queries: int = 0  # tokens that tiers behind the pool were asked for
    tier_hits: int = 0  # of them, those that requests went on from
    tier_stored: int = 0  # blocks
    snapshot_queries: int = 0
    snapshot_hits: int = 0
    snapshot_evictions: int = 0
    snapshots_taken: int = 0
    preemptions: int = 0
    displacements: int = 0  # of them, those for another tenant's sake
    steps: int = 0
    step_tokens: int = 0  # that they computed and kept
    steps_by_tokens: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STEP_TOKENS, 0))
    epochs: int = 0
    replayed_requests: int = 0
    aborted_requests: int = 0
    poisoned_requests: int = 0
    canaries: int = 0  # that ended well
    canary_tokens: int = 0  # of generation_tokens, theirs, however they ended
    draft_tokens: int = 0
    drafter_faults: int = 0
    fenced_messages: int = 0  # results of epochs that were over
    finished: Counter[str] = field(default_factory=Counter)
    checked_rows: int = 0  # held against our own books
    checked_digests: int = 0  # of ranks, held against rank 0's
    rows_by_mode: Tally = field(default_factory=Tally)
    steps_by_mode: Tally = field(default_factory=Tally)  # with such a row
    rows_by_cap: Tally = field(default_factory=Tally)  # all rows by max_drafts
    drafted: Tally = field(default_factory=Tally)  # windows with drafts, by how many
    accepted: Tally = field(default_factory=Tally)  # the same windows, by how many were accepted

    def count(
        self,
        advance: IntArray,
        emitted: IntArray,
        drafts: IntArray,
        accepted: IntArray,
        *,
        mode: IntArray,
        max_drafts: IntArray,
    ) -> None:
        """Count a step whose rows [R] committed, emitted, verified and accepted so many tokens."""
        self.steps += 1
        self.checked_rows += len(mode)
        self.steps_by_mode.add(self.rows_by_mode.add(mode).nonzero()[0])
        self.rows_by_cap.add(max_drafts)
        tokens = int(advance.sum())
        self.step_tokens += tokens
        self.steps_by_tokens[
            STEP_TOKENS[bisect_left(STEP_TOKENS, tokens, hi=len(STEP_TOKENS) - 1)]
        ] += 1
        self.generation_tokens += int(emitted.sum())
        self.draft_tokens += int(drafts.sum())
        verified = drafts > 0
        self.drafted.add(drafts[verified])
        self.accepted.add(accepted[verified])

    @property
    def num_drafts(self) -> int:
        """Windows verified with at least one draft."""
        return int(self.accepted.counts.sum())

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted and emitted."""
        return int(np.arange(len(self.accepted.counts)) @ self.accepted.counts)

    @property
    def rows_by_k(self) -> list[int]:
        """Rows that decode, by the most drafts that they were given: see PlanRows.max_drafts."""
        by_mode = _by_mode(self.rows_by_mode)
        counts: list[int] = self.rows_by_cap.counts.tolist()
        return [by_mode[MODES[DECODE]], *counts[1:]]

    def by_mode(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return steps and rows by the names of modes."""
        return _by_mode(self.steps_by_mode), _by_mode(self.rows_by_mode)


def _by_mode(tally: Tally) -> dict[str, int]:
    counts = dict(enumerate(tally.counts.tolist()))
    return {name: counts.get(mode, 0) for mode, name in MODES.items()}
