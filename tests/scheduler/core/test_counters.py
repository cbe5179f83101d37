from __future__ import annotations

import numpy as np
import pytest
from surestep_common.invariants import DECODE, PREFILL, VERIFY
from surestep_scheduler.core.counters import STEP_TOKENS, Counters


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [([0], 1), ([1], 1), ([1, 1], 8), ([8], 8), ([4, 5], 16), ([16384], 16384), ([16384, 1], 0)],
)
def test_steps_are_counted_by_their_tokens(tokens: list[int], bound: int) -> None:
    counters = Counters()
    none = np.zeros(len(tokens), dtype=np.int64)
    counters.count(np.array(tokens), none, none, none, mode=none + DECODE, max_drafts=none)
    assert counters.steps_by_tokens == dict.fromkeys(STEP_TOKENS, 0) | {bound: 1}
    assert counters.step_tokens == sum(tokens)
    assert counters.steps == 1


def test_rows_and_windows_are_told_apart() -> None:
    counters = Counters()
    columns = {
        "advance": [5, 1, 1, 3, 2],
        "emitted": [0, 1, 1, 3, 2],
        "drafts": [0, 0, 0, 4, 1],  # of the third row the drafter found nothing
        "accepted": [0, 0, 0, 2, 1],
        "mode": [PREFILL, DECODE, VERIFY, VERIFY, VERIFY],
        "max_drafts": [0, 0, 4, 4, 2],
    }
    for _ in range(2):
        counters.count(**{name: np.array(values) for name, values in columns.items()})
    steps, rows = counters.by_mode()
    assert steps == {"prefill": 2, "prefill_last": 0, "decode": 2, "verify": 2, "pool": 0}
    assert rows == {"prefill": 2, "prefill_last": 0, "decode": 2, "verify": 6, "pool": 0}
    assert counters.rows_by_k == [2, 0, 2, 0, 4]
    assert counters.drafted.counts.tolist() == [0, 2, 0, 0, 2]
    assert counters.accepted.counts.tolist() == [0, 2, 2]
    assert counters.accepted.at_least() == [4, 2]
    assert (counters.num_drafts, counters.accepted_tokens, counters.draft_tokens) == (4, 6, 10)
    assert counters.checked_rows == 10


def test_nothing_was_counted_yet() -> None:
    counters = Counters()
    assert counters.accepted.at_least() == []
    assert (counters.num_drafts, counters.accepted_tokens, counters.rows_by_k) == (0, 0, [0])
