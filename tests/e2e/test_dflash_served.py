"""A model with a DFlash drafter behind `surestep serve`: text, a killed worker, and its kin; and
the second command line of vllm-project/vllm#41190, a quantised hybrid on two ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.dflash import make_counting_pair, save_drafter, sizes_for
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.quantize import quantize
from support.clients.drafted import SIZES, check_drafts, check_survival, complete, speculation
from support.processes.stack import Stack, serve
from support.references.dflash import KINDS, DFlashReference

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


# As in the report, but for the number of tokens that fit, and the kernels of its GPUs.
NAME = "QuantTrio/Qwen3.6-35B-A3B-AWQ"
REPORTED = (
    *("--served-model-name", NAME, "--tensor-parallel-size", "2", "--max-num-batched-tokens", "64"),
    *("--gpu-memory-utilization", "0.85", "--gdn-prefill-backend", "triton", *SIZES),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
    "--trust-remote-code",
)
PLAIN = ("in_proj_ba", "gate", "shared_expert_gate")  # as published checkpoints leave them


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A hybrid of AWQ experts and layers, two ranks, and a drafter of random weights."""
    folder = tmp_path_factory.mktemp("report")
    inner: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    source = make_tiny_hybrid(folder / "m", "qwen3_next", mtp=False, tokenizer=True, **inner)
    target = quantize(source, "awq", plain=PLAIN).quantized
    layers: Any = {"layer_types": KINDS, "block_size": 16, "target_layer_ids": (0, 1, 2)}
    drafter = DFlashReference(sizes_for(target), mask_id=383, **layers)
    save_drafter(folder / "drafter", drafter, num_target_layers=4)
    with serve(target, folder / "logs", *REPORTED, *flags(folder / "drafter")) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_41190_drafts_of_two_ranks_change_no_text(pair: Stack, temperature: float) -> None:
    check_drafts(pair, NAME, 15, temperature=temperature, **PROMPT)
    ranks = pair.scheduler()["ranks"]
    assert [(rank["rank"], rank["drafter"]) for rank in ranks] == [(0, "dflash"), (1, "dflash")]
    assert pair.metric("surestep:worker_restarts_total") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_41190_a_killed_rank_changes_no_text(pair: Stack, rank: int) -> None:
    plain = complete(pair, NAME, 0, **PROMPT).choices[0].text
    check_survival(pair, NAME, 15, plain, rank=rank, **PROMPT)
