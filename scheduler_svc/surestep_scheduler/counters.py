"""Totals since the start of the process."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from surestep_common.invariants import IntArray

# Bounds on the tokens of a step, by which steps are counted; 0 stands for those beyond all.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 0)


@dataclass(slots=True)
class Counters:
    """Tokens, requests and steps; see SchedulerStats in generate.proto."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
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
    windows: Counter[int] = field(default_factory=Counter)  # windows with drafts, by accepted count

    def count(
        self, advance: IntArray, emitted: IntArray, drafts: IntArray, accepted: IntArray
    ) -> None:
        """A step whose rows [R] committed, emitted, verified and accepted so many tokens."""
        self.steps += 1
        tokens = int(advance.sum())
        self.step_tokens += tokens
        self.steps_by_tokens[
            STEP_TOKENS[bisect_left(STEP_TOKENS, tokens, hi=len(STEP_TOKENS) - 1)]
        ] += 1
        self.generation_tokens += int(emitted.sum())
        self.draft_tokens += int(drafts.sum())
        windows = np.bincount(accepted[drafts > 0])
        self.windows.update(dict(enumerate(windows.tolist())))

    @property
    def num_drafts(self) -> int:
        """Windows verified with at least one draft."""
        return self.windows.total()

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted and emitted."""
        return sum(accepted * count for accepted, count in self.windows.items())

    def accepted_per_position(self) -> list[int]:
        """How often the draft at each position was accepted."""
        longest = max(self.windows, default=0)
        at_least = accumulate(self.windows[n] for n in range(longest, 0, -1))
        return list(at_least)[::-1]
