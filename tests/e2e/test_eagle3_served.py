"""A model with an EAGLE-3 head behind `surestep serve`: text, a killed worker, a broken head, and
the head as the main argument."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.drafted import SIZES, check_drafts, check_survival, complete, speculation
from support.processes.stack import Stack, serve
from surestep_cli.monitor.status import remarks

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=0)]


def flags(head: Path) -> tuple[str, ...]:
    return *SIZES, *speculation(head, 4, method="eagle3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), layers=5, tokenizer=True)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), make_reference(model), layer_ids=(1, 2, 4))


@pytest.fixture(scope="module")
def stack(model: Path, head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(model, tmp_path_factory.mktemp("logs"), *flags(head)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(stack: Stack, model: Path, temperature: float) -> None:
    check_drafts(stack, model.name, 4, temperature=temperature)


def test_a_killed_worker_changes_no_text(stack: Stack, model: Path, head: Path) -> None:
    """The head's files are gone by then: its weights outlive the rank."""
    plain = complete(stack, model.name, 0).choices[0].text
    shutil.rmtree(head)
    check_survival(stack, model.name, 4, plain)


def test_a_broken_head_costs_only_the_drafts(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "logs", *flags(tmp_path / "nothing")) as stack:
        assert complete(stack, model.name, 4).choices[0].text
        assert stack.metric("vllm:spec_decode_num_draft_tokens_total") == 0
        logged = "".join(path.read_text() for path in (tmp_path / "logs").glob("worker*.log"))
        assert "the model is served without speculation" in logged
        status, fault = stack.status(), f"draft model {tmp_path / 'nothing'}: cannot read"
        assert fault in status["scheduler"]["ranks"][0]["drafter_fault"]
        assert any(f"nothing is drafted: {fault}" in line for line in remarks(status))
        assert fault in stack.get("/overview")["schedulers"][0]["model"]["drafter_fault"]
        assert stack.metric("surestep:drafter_broken") == 1
        told = (tmp_path / "logs" / "console.log").read_text()
        assert f"Warning: nothing is drafted: {fault}" in told


def test_a_head_of_speculators_is_served_with_its_model(model: Path, tmp_path: Path) -> None:
    """Under both names, with as many drafts as it was made for."""
    about = {
        "verifier": {"name_or_path": os.path.relpath(model, tmp_path / "speculator")},
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    }
    form: Any = {"form": "speculators", "layer_ids": (1, 2, 4), "speculators_config": about}
    head = save_head(tmp_path / "speculator", make_reference(model), **form)
    with serve(head, tmp_path / "logs", *SIZES, "--no-adaptive-draft-length") as stack:
        names = [card["id"] for card in stack.get("/v1/models")["data"]]
        assert names == ["speculator", model.name]
        texts = {
            complete(stack, name, drafts).choices[0].text for name in names for drafts in (0, 3)
        }
        assert len(texts) == 1
        [rank] = stack.status()["scheduler"]["ranks"]
        assert (rank["model_path"], rank["drafter"]) == (str(model), "eagle3")
        assert rank["max_draft_tokens"] == 3
        assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > 0
