from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.clients.prompt_reader import Reader, make_reader


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    """Makes the reader of a published template, once."""
    return cache(lambda name: make_reader(name, tmp_path_factory.mktemp(name)))
