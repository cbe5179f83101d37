"""The models and expectations that tests of promises share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.parity.bench import (
    ParityBench,
    make_eagle3,
    make_eagle3_gpt_oss,
    make_eagle3_hybrid,
    make_gpt_oss,
    make_hybrid,
    make_least_gpt_oss,
    make_model,
)
from support.parity.grammars import make_guided_requests, with_tokenizer
from support.parity.latent_models import make_deepseek_v3, make_glm_dsa


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dense model. Read only."""
    folder = tmp_path_factory.mktemp("dense")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """What every request answers alone without speculation. Read only."""
    return ParityBench(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def hybrid_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a hybrid with an MTP head. Read only."""
    return ParityBench(tmp_path_factory.mktemp("hybrid_parity"), make_hybrid)


@pytest.fixture(scope="session")
def eagle3_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a dense model with an EAGLE-3 head that is mostly right. Read only."""
    return ParityBench(tmp_path_factory.mktemp("eagle3_parity"), make_eagle3)


@pytest.fixture(scope="session")
def eagle3_hybrid_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a hybrid with an EAGLE-3 head of random weights. Read only."""
    return ParityBench(tmp_path_factory.mktemp("eagle3_hybrid"), make_eagle3_hybrid)


@pytest.fixture(scope="session")
def eagle3_gpt_oss_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for gpt-oss with an EAGLE-3 head of random weights. Read only."""
    return ParityBench(tmp_path_factory.mktemp("eagle3_gpt_oss"), make_eagle3_gpt_oss)


@pytest.fixture(scope="session")
def gpt_oss_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for gpt-oss, with windows much shorter than the requests. Read only."""
    return ParityBench(tmp_path_factory.mktemp("gpt_oss_parity"), make_gpt_oss)


@pytest.fixture(scope="session")
def glm_dsa_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a GLM-5 whose requests are longer than what its indexers choose. Read only."""
    return ParityBench(tmp_path_factory.mktemp("glm_dsa_parity"), make_glm_dsa)


@pytest.fixture(scope="session")
def deepseek_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a DeepSeek-V3. Read only."""
    return ParityBench(tmp_path_factory.mktemp("deepseek_parity"), make_deepseek_v3)


@pytest.fixture(scope="session")
def least_gpt_oss_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for the least gpt-oss, with an EAGLE-3 head of random weights. Read only."""
    folder = make_least_gpt_oss(tmp_path_factory.mktemp("least_gpt_oss"), mxfp4=False)
    return ParityBench(folder, make=lambda folder: None)


@pytest.fixture(scope="session")
def least_mxfp4_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same with experts in MXFP4. Read only."""
    folder = make_least_gpt_oss(tmp_path_factory.mktemp("least_mxfp4"), mxfp4=True)
    return ParityBench(folder, make=lambda folder: None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter as a GPU computes, and as fast as it can be, where there is no GPU."""
    if not torch.cuda.is_available():
        from support.kernels.triton_interpreter import repair

        repair(monkeypatch)


def _guided(tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path], None]) -> ParityBench:
    """A bench whose model has a tokenizer, and whose requests have grammars."""
    folder = tmp_path_factory.mktemp("guided")
    return ParityBench(folder, partial(with_tokenizer, make), make_guided_requests)


@pytest.fixture(scope="session")
def guided_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return _guided(tmp_path_factory, make_model)


@pytest.fixture(scope="session")
def guided_hybrid_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return _guided(tmp_path_factory, make_hybrid)


@pytest.fixture(scope="session")
def guided_eagle3_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return _guided(tmp_path_factory, make_eagle3)
