from __future__ import annotations

import numpy as np
import pytest
from surestep_scheduler.counters import STEP_TOKENS, Counters


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [([0], 1), ([1], 1), ([1, 1], 8), ([8], 8), ([4, 5], 16), ([16384], 16384), ([16384, 1], 0)],
)
def test_steps_are_counted_by_their_tokens(tokens: list[int], bound: int) -> None:
    counters = Counters()
    none = np.zeros(len(tokens), dtype=np.int64)
    counters.count(np.array(tokens), emitted=none, drafts=none, accepted=none)
    assert counters.steps_by_tokens == dict.fromkeys(STEP_TOKENS, 0) | {bound: 1}
    assert counters.step_tokens == sum(tokens)
    assert counters.steps == 1
