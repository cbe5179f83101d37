"""What an attacker finds: a small model, served as a user serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(path, "llama", seed=7, tokenizer=True)
