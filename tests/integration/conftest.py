"""The models and expectations that parity tests share."""

from __future__ import annotations

import pytest
import torch
from support.parity.bench import ParityBench, make_gpt_oss, make_hybrid


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """What every request answers alone without speculation. Read only."""
    return ParityBench(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def hybrid_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for a hybrid with an MTP head. Read only."""
    return ParityBench(tmp_path_factory.mktemp("hybrid_parity"), make_hybrid)


@pytest.fixture(scope="session")
def gpt_oss_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    """The same for gpt-oss, with windows much shorter than the requests. Read only."""
    return ParityBench(tmp_path_factory.mktemp("gpt_oss_parity"), make_gpt_oss)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter as fast as it can be, where there is no GPU."""
    if not torch.cuda.is_available():
        from support.kernels.triton_interpreter import patch_once

        patch_once(monkeypatch)
