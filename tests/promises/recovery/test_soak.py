"""Minutes of mixed traffic with a fault every few seconds: nothing fails, no text differs.

`scripts/test tests/promises/recovery/test_soak.py -n 0 --soak-minutes 30` is the long form.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from support.faults.cases import SEED
from support.faults.run import Served, served_by
from support.faults.soak import grown, memory, soak

_SHORT_S = 30.0
_SHORT_EVERY_S = 2.0, 4.0
_EVERY_S = 10.0, 20.0


@served_by(["ngram-tp1"])
def test_a_fault_every_few_seconds(
    served: Served,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    minutes: float = request.config.getoption("--soak-minutes")
    long = minutes > 0
    before = memory(served.server)
    seen = asyncio.run(
        soak(
            served,
            60 * minutes if long else _SHORT_S,
            _EVERY_S if long else _SHORT_EVERY_S,
            random.Random(SEED),
        )
    )
    record_property("summary", f"soak: {seen.summary()}")
    assert seen.failures == []
    assert len(seen.faults) >= 3
    served.server.recovered(served.holdings)
    assert grown(before, memory(served.server)) == []
