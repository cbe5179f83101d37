"""Both clients."""

from __future__ import annotations

import pytest
from support.clients.calls import Generate, asynchronous, blocking


@pytest.fixture(params=[blocking, asynchronous], ids=["blocking", "asynchronous"])
def generate(request: pytest.FixtureRequest) -> Generate:
    """An answer by either of them."""
    client: Generate = request.param
    return client
