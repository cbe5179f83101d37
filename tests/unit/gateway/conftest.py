from __future__ import annotations

import pytest
from support.checkpoints import tiny_tokenizer
from surestep_gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny byte-level tokenizer."""
    return Tokenizer(tiny_tokenizer.build())
