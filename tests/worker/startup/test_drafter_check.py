"""The check of a drafter at the start: few drafts say little, many say whether it is the model's."""

from __future__ import annotations

import pytest
from surestep_worker.startup.profile import Check


@pytest.mark.parametrize(
    ("drafts", "most_low"), [(0, -1), (32, -1), (64, 0), (96, 1), (192, 5), (100_000, 6812)]
)
def test_low_is_what_a_sound_head_hardly_ever_has(drafts: int, most_low: int) -> None:
    """At the edge to the accepted draft, also where binomial coefficients exceed floats."""
    if most_low >= 0:
        assert Check(9, drafts, most_low).is_low
    assert not Check(9, drafts, most_low + 1).is_low
