"""Every fault, with sixteen streams of all kinds open: no client can tell, but by the clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.faults.cases import FAULTS, GLM, SEED, Fault, cases
from support.faults.run import Served, survive

pytestmark = pytest.mark.timeout(300)


@pytest.mark.rotates(1, always=("",))  # shares have faults of their own
def test_no_request_is_lost(
    served: Served, fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", survive(served, fault, f"{SEED}-{fault.name}"))


def test_each_fault_once_in_a_share_and_all_in_six() -> None:
    for share in range(24):
        shares = [
            [fault.name for setup, fault in cases(turn) if setup != GLM]
            for turn in range(share, share + 6)
        ]
        assert all(len(names) == len(set(names)) for names in shares)
        assert set().union(*shares) == {fault.name for fault in FAULTS}
