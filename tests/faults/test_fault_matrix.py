"""Every fault, with sixteen streams of all kinds open: no client can tell, but by the clock."""

from __future__ import annotations

import pytest
from support.faults.cases import SEED, Fault
from support.faults.run import Served, survive

pytestmark = pytest.mark.timeout(300)


def test_no_request_is_lost(served: Served, fault: Fault) -> None:
    survive(served, fault, f"{SEED}-{fault.name}")
