"""A model that drafts for another behind `surestep serve`: text, a killed worker, another
vocabulary."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints.drafting import add_noise
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.drafted import SIZES, check_drafts, check_survival, complete, speculation
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(2, turn=0)]


def flags(draft: Path) -> tuple[str, ...]:
    """The method is left out: an ordinary model is a draft model."""
    return *SIZES, *speculation(draft, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_noise(model, tmp_path_factory.mktemp("drafts") / "draft", 0.05)


@pytest.fixture(scope="module")
def stack(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(model, tmp_path_factory.mktemp("logs"), *flags(draft)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(stack: Stack, model: Path, temperature: float) -> None:
    check_drafts(stack, model.name, 4, temperature=temperature)
    [rank] = stack.status()["scheduler"]["ranks"]
    assert (rank["drafter"], rank["max_draft_tokens"]) == ("draft_model", 4)
    drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    assert stack.metric("vllm:spec_decode_num_accepted_tokens_total") > 0.3 * drafted > 0


def test_a_killed_worker_changes_no_text(stack: Stack, model: Path, draft: Path) -> None:
    """The draft model's files are gone by then: its weights outlive the rank."""
    plain = complete(stack, model.name, 0).choices[0].text
    shutil.rmtree(draft)
    check_survival(stack, model.name, 4, plain)


def test_another_vocabulary_costs_only_the_drafts(model: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab=280, tokenizer=True)
    with serve(model, tmp_path / "logs", *flags(other)) as stack:
        assert complete(stack, model.name, 4).choices[0].text
        told = (tmp_path / "logs" / "console.log").read_text()
        fault = f"draft model {other}: its vocabulary is another: it has none as token 280"
        assert f"Warning: nothing is drafted: {fault}, the model has '" in told
        assert stack.metric("surestep:drafter_broken") == 1
