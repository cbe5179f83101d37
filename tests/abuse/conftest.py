"""What an attacker finds: a small model, served as a user serves it, or its text side alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import tiny_tokenizer
from support.checkpoints.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(path, "llama", seed=7, tokenizer=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of a gateway: a tokenizer and nothing else."""
    return tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "tiny")
