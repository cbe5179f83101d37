"""Servers of the fault suite, one for each way to draft and number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_cases import SEED, Setup, cases
from fault_run import Served, prepare
from fault_server import serve_for_faults
from tiny import make_tiny_checkpoint

HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"
_SPECULATION = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    "mtp": '{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}',
}


def pytest_generate_tests(metafunc: Any) -> None:
    """Which servers meet which faults; tests of one server stay together."""
    if "fault" in metafunc.fixturenames:
        chosen = cases(metafunc.config.getoption("--full-faults"))
        params = [
            pytest.param(setup, fault, id=f"{setup}-{fault.name}", marks=group(setup))
            for setup, fault in chosen
        ]
        metafunc.parametrize(("served", "fault"), params, indirect=["served"], scope="module")


def group(setup: Setup) -> pytest.MarkDecorator:
    """Tests of one server run in one worker of pytest-xdist."""
    return pytest.mark.xdist_group(f"faults-{setup}")


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(path, "llama", seed=7, tokenizer=True, max_position=1024)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, dense_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server of a setup, and what its sixteen streams say when nothing happens."""
    setup: Setup = request.param
    flags = ["--tensor-parallel-size", str(setup.ranks)]
    if setup.speculation != "none":
        flags += ["--speculative-config", _SPECULATION[setup.speculation]]
        flags += ["--no-adaptive-draft-length"]
    model = HYBRID if setup.speculation == "mtp" else dense_model
    folder = tmp_path_factory.mktemp(str(setup))
    with serve_for_faults(model, folder, *flags) as server:
        yield prepare(server, setup.ranks, random.Random(SEED))
