"""The models and expectations that tests of promises share, made once and read only."""

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

Make = Callable[[Path], None]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dense model."""
    folder = tmp_path_factory.mktemp("dense")
    make_model(folder)
    return folder


def _bench(make: Make) -> Callable[..., ParityBench]:
    """A fixture: what every request answers alone without speculation, of a model made so."""

    @pytest.fixture(scope="session")
    def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
        return ParityBench(tmp_path_factory.mktemp("bench"), make)

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
    def guided(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
        folder = tmp_path_factory.mktemp("guided")
        return ParityBench(folder, partial(with_tokenizer, make), make_guided_requests)

    return guided


bench = _bench(make_model)
hybrid_bench = _bench(make_hybrid)  # with an MTP head
eagle3_bench = _bench(make_eagle3)  # whose head is mostly right; those of the next two are random
eagle3_hybrid_bench = _bench(make_eagle3_hybrid)
eagle3_gpt_oss_bench = _bench(make_eagle3_gpt_oss)
gpt_oss_bench = _bench(make_gpt_oss)  # with windows much shorter than the requests
glm_dsa_bench = _bench(make_glm_dsa)  # requests are longer than what its indexers choose
deepseek_bench = _bench(make_deepseek_v3)
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
