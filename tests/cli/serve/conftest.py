from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.launcher import Bench, leftovers


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Nothing that it started is left behind."""
    yield Bench(tmp_path)
    assert leftovers() == []
