from __future__ import annotations

from pathlib import Path

import pytest
import tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder: a tokenizer and nothing else."""
    return tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "tiny")
