from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.checkpoints import tiny_tokenizer
from support.processes.gateway_stack import Stack, StartStack, stacks
from surestep_gateway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder: a tokenizer and nothing else."""
    return tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose template begins the reasoning and whose markers are special tokens."""
    folder = tmp_path_factory.mktemp("models") / "thinking"
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return tiny_tokenizer.save(folder, *markers, template=tiny_tokenizer.THINKING_TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of that folder."""
    return Tokenizer.load(model)


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    """Starts a stack with settings that differ from the default ones."""
    async with stacks(model) as start:
        yield start


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """A stack with default settings."""
    return await start_stack()


@pytest.fixture
def never_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends with the first loss of its scheduler."""
    monkeypatch.setattr("surestep_gateway.schedulers.journal.MAX_RESUMES", 0)


@pytest.fixture
def thinking(thinking_model: Path) -> Tokenizer:
    """The tokenizer of `thinking_model`."""
    return Tokenizer.load(thinking_model)
