"""One server for the tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import Stack, serve

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--kv-cache-memory", "0.05")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_checkpoint(path, "llama", seed=7, tokenizer=True)
    return path


@pytest.fixture(scope="session")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole system with n-gram speculation on."""
    logs = tmp_path_factory.mktemp("logs")
    with serve(tiny_model, logs, *FLAGS, "--speculative-config", SPECULATION) as running:
        yield running
