"""The model and the expectations that all parity tests share."""

from __future__ import annotations

import pytest
from parity import ParityBench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """What every request answers alone without speculation. Read only."""
    return ParityBench(tmp_path_factory.mktemp("parity"))
