"""The models and expectations that tests of promises share, made once and read only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.parity.bench import (
    ParityBench,
    make_branches,
    make_draft_hybrid,
    make_draft_model,
    make_draft_twin,
    make_eagle3,
    make_eagle3_gpt_oss,
    make_eagle3_hybrid,
    make_gpt_oss,
    make_hybrid,
    make_least_gpt_oss,
    make_model,
    make_mtp,
    make_small,
)
from support.parity.block_drafters import make_dflash, make_dflash_hybrid, make_peagle
from support.parity.grammars import make_guided_requests, with_tokenizer
from support.parity.latent_models import make_deepseek_v3, make_glm_dsa
from support.suite.sharing import shared_folder

Make = Callable[[Path], None]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dense model."""
    folder = tmp_path_factory.mktemp("dense")
    make_model(folder)
    return folder


def _bench(make: Make, implementation: str = "auto") -> Callable[..., ParityBench]:
    """A fixture: what every request answers alone without speculation, of a model made so."""

    @pytest.fixture(scope="session")
    def bench(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> ParityBench:
        folder = shared_folder(tmp_path_factory, str(request.fixturename))
        return ParityBench(folder, make, implementation=implementation)

    return bench


def _least_bench(*, mxfp4: bool) -> Callable[..., ParityBench]:
    """The same of the least gpt-oss, with an EAGLE-3 head of random weights."""

    @pytest.fixture(scope="session")
    def least(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
        folder = make_least_gpt_oss(tmp_path_factory.mktemp("least"), mxfp4=mxfp4)
        return ParityBench(folder, make=lambda folder: None)

    return least


def _guided(make: Make) -> Callable[..., ParityBench]:
    """The same, but that the model has a tokenizer and the requests have grammars."""

    @pytest.fixture(scope="session")
    def guided(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> ParityBench:
        folder = shared_folder(tmp_path_factory, str(request.fixturename))
        return ParityBench(folder, partial(with_tokenizer, make), make_guided_requests)

    return guided


bench = _bench(make_model)
hybrid_bench = _bench(make_hybrid)  # with an MTP head
mimo_bench = _bench(partial(make_mtp, "mimo"))  # with others
ernie_bench = _bench(partial(make_mtp, "ernie4_5_moe"))
eagle3_bench = _bench(make_eagle3)  # whose head is mostly right; those of the next two are random
eagle3_theirs_bench = _bench(make_eagle3, implementation="transformers")
eagle3_hybrid_bench = _bench(make_eagle3_hybrid)
peagle_bench = _bench(make_peagle)  # whose head is random, too
eagle3_gpt_oss_bench = _bench(make_eagle3_gpt_oss)
dflash_bench = _bench(make_dflash)  # mostly right; the drafter of the hybrid is random
dflash_theirs_bench = _bench(make_dflash, implementation="transformers")
dflash_hybrid_bench = _bench(make_dflash_hybrid)
draft_model_bench = _bench(make_draft_model)  # mostly right, and so is what drafts for cohere
draft_theirs_bench = _bench(partial(make_draft_twin, "cohere"))
draft_hybrid_bench = _bench(make_draft_hybrid)  # which a hybrid drafts for
gpt_oss_bench = _bench(make_gpt_oss)  # with windows much shorter than the requests
mixtral_bench = _bench(partial(make_small, "mixtral"))
qwen3_moe_bench = _bench(partial(make_small, "qwen3_moe"))
phi3_bench = _bench(partial(make_small, "phi3"))
smollm3_bench = _bench(partial(make_small, "smollm3"))
cohere_bench = _bench(partial(make_small, "cohere"))
glm_dsa_bench = _bench(make_glm_dsa)  # requests are longer than what its indexers choose
deepseek_bench = _bench(make_deepseek_v3)
gemma2_bench = _bench(partial(make_branches, name="gemma2"))  # with caps, and windows of 6 tokens
gemma3_bench = _bench(partial(make_branches, name="gemma3"))
olmo3_bench = _bench(partial(make_branches, name="olmo3"))
granite_bench = _bench(partial(make_branches, name="granite"))
least_gpt_oss_bench = _least_bench(mxfp4=False)
least_mxfp4_bench = _least_bench(mxfp4=True)
guided_bench = _guided(make_model)
guided_hybrid_bench = _guided(make_hybrid)
guided_eagle3_bench = _guided(make_eagle3)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter as a GPU computes, and as fast as it can be, where there is no GPU."""
    if not torch.cuda.is_available():
        from support.kernels.triton_interpreter import repair

        repair(monkeypatch)
