"""Every fault, with sixteen streams of all kinds open: no client can tell, but by the clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.faults.cases import SEED, Fault
from support.faults.run import Served, survive

pytestmark = pytest.mark.timeout(300)


def test_no_request_is_lost(
    served: Served, fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    record_property("summary", survive(served, fault, f"{SEED}-{fault.name}"))
