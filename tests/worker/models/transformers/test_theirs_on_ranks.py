"""Two ranks serve models of transformers' code as transformers computes them, and as one does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoints.any_architecture import fields_of
from support.parity.architectures import saved
from support.processes.ports import free_address
from support.ranks.spawn import run
from support.ranks.tensor_parallel import TIMEOUT_S
from support.ranks.theirs import Told, ids_of, rank_main, tell
from surestep_worker.distributed.tensor_parallel import TensorParallel
from torch import Tensor

ONE_KV_HEAD, TIED, EXPERTS = "one KV head", "tied", "expert-parallel"
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    ONE_KV_HEAD: {"num_key_value_heads": 1, "head_dim": 80},
    TIED: {"tie_word_embeddings": True},
    EXPERTS: {},
}
_FAR = 1e-4
_CASE_S = 15.0  # on a busy machine

CASES = [
    "CohereForCausalLM",
    f"CohereForCausalLM, {ONE_KV_HEAD}",
    f"CohereForCausalLM, {TIED}",
    "GPTNeoXForCausalLM",  # queries, keys and values of a head lie together
    "Glm4ForCausalLM",  # gates and ups in one matrix
    "DeepseekV2ForCausalLM",  # latents
    f"Olmo2ForCausalLM, {ONE_KV_HEAD}",  # norms across heads
    "MiMoV2FlashForCausalLM",  # sinks, layers with fewer KV heads
    f"MiMoV2FlashForCausalLM, {ONE_KV_HEAD}",
    "ApertusForCausalLM",  # products in float32
    "GPT2LMHeadModel",  # no plan, and weights [K, N]
    "OPTForCausalLM",  # no plan
    "YoutuForCausalLM",  # a plan without attention
    "BeamForCausalLM",  # a bias that is no matrix's, experts
    "AriaTextForCausalLM",  # experts [K, N]
    f"AriaTextForCausalLM, {EXPERTS}",
    "PhimoeForCausalLM",  # experts whose activation is ours
    f"GraniteMoeForCausalLM, {EXPERTS}",
    "Ernie4_5_MoeForCausalLM",
    f"NemotronForCausalLM, {ONE_KV_HEAD}",
]


class Trial(NamedTuple):
    """Checkpoint on two ranks."""

    wanted: Tensor  # logits of transformers
    alone: Told
    ranks: list[Told]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the cases that are run, with transformers' logits and both ranks' results."""
    path, items = tmp_path_factory.mktemp("theirs"), request.session.items
    mine = [it for it in items if isinstance(it, pytest.Function) and it.module is request.module]
    cases = [str(item.callspec.params["case"]) for item in mine]
    for case in cases:
        architecture, _, shape = case.partition(", ")
        theirs = saved(architecture, path / _name(case), **fields_of(architecture, SHAPES[shape]))
        vocab_size = theirs.config.get_text_config(decoder=True).vocab_size
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids_of(vocab_size)])).logits[0]
        torch.save(wanted, path / f"{_name(case)}.wanted")
    address, names = free_address(), [_name(case) for case in cases]
    timeout_s = TIMEOUT_S + _CASE_S * len(cases)
    run(rank_main, [(rank, address, path, names) for rank in range(2)], timeout_s)
    return path


def _name(case: str) -> str:
    return case.replace(", ", "-").replace(" ", "_")


@pytest.fixture
def trial(folder: Path, case: str) -> Trial:
    at = folder / _name(case)
    ranks = [Told(**torch.load(f"{at}.rank{rank}")) for rank in range(2)]
    return Trial(torch.load(f"{at}.wanted"), tell(at, TensorParallel()), ranks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.rotates(5)
def test_two_ranks_compute_as_transformers_and_as_one_rank_do(trial: Trial) -> None:
    one, two = trial.ranks
    far = float((one.logits - trial.wanted).abs().max())
    assert far <= _FAR * max(1.0, float(trial.wanted.abs().max()))
    assert torch.equal(one.logits.argmax(1), trial.alone.logits.argmax(1))
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.logits, one.in_pieces)
    assert max(rank.weight_bytes for rank in trial.ranks) < 0.56 * trial.alone.weight_bytes
    for rank in trial.ranks:
        assert "depend on their company" in rank.refused
