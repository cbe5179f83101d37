"""A model with a DFlash drafter behind `surestep serve`: text, a killed worker, and its kin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.dflash import make_counting_pair
from support.clients.drafted import SIZES, check_drafts, check_survival, complete, speculation
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(2, turn=0)]


def flags(drafter: Path) -> tuple[str, ...]:
    """With vLLM's spelling."""
    return *SIZES, *speculation(drafter, 15, method="dflash")


PROMPT: dict[str, Any] = {
    "prompt": "the quick brown fox jumps over it",
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters") / "drafter"


@pytest.fixture(scope="module")
def model(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_counting_pair(folder, drafter, vocab=384, tokenizer=True)


@pytest.fixture(scope="module")
def stack(model: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(model, tmp_path_factory.mktemp("logs"), *flags(drafter)) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(stack: Stack, model: Path, temperature: float) -> None:
    check_drafts(stack, model.name, 15, temperature=temperature, **PROMPT)
    [rank] = stack.status()["scheduler"]["ranks"]
    assert (rank["drafter"], rank["max_draft_tokens"]) == ("dflash", 15)
    drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    assert stack.metric("vllm:spec_decode_num_accepted_tokens_total") > 0.3 * drafted > 0


def test_a_killed_worker_changes_no_text(stack: Stack, model: Path, drafter: Path) -> None:
    """The drafter's files are gone by then: its weights outlive the rank."""
    plain = complete(stack, model.name, 0, **PROMPT).choices[0].text
    kept = drafter.rename(drafter.with_name("kept"))
    check_survival(stack, model.name, 15, plain, **PROMPT)
    kept.rename(drafter)


def test_kin_that_is_not_served_costs_only_the_drafts(
    model: Path, drafter: Path, tmp_path: Path
) -> None:
    kin = tmp_path / "kin"
    shutil.copytree(drafter, kin)
    whole = json.loads((kin / "config.json").read_text())
    (kin / "config.json").write_text(json.dumps(whole | {"architectures": ["Qwen3DSparkModel"]}))
    with serve(model, tmp_path / "logs", *flags(kin)) as stack:
        assert complete(stack, model.name, 4, **PROMPT).choices[0].text
        told = (tmp_path / "logs" / "console.log").read_text()
        fault = f"draft model {kin}: Qwen3DSparkModel is not served as a DFlash drafter"
        assert f"Warning: nothing is drafted: {fault}" in told
        assert stack.metric("surestep:drafter_broken") == 1
