from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.checkpoints import tiny_tokenizer
from support.clients.prompt_reader import Reader, make_reader
from surestep_gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny byte-level tokenizer."""
    return Tokenizer(tiny_tokenizer.build())


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    """Makes the reader of a published template, once."""
    return cache(lambda name: make_reader(name, tmp_path_factory.mktemp(name)))
