"""Which servers meet which faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.faults.cases import SEED, Setup, cases
from support.faults.run import Served, flags, model, prepare
from support.faults.server import serve_for_faults

_AROUND_S = 300.0


def pytest_generate_tests(metafunc: Any) -> None:
    """Tests that take a `fault` meet all of them, each on the servers where it is to run."""
    if "fault" in metafunc.fixturenames:
        option = metafunc.config.option
        params = [
            pytest.param(setup, fault, id=f"{setup}-{fault.name}")
            for setup, fault in cases(None if option.full else option.share)
        ]
        metafunc.parametrize(("served", "fault"), params, indirect=["served"], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The soak takes as long as it is told to, and what a server needs to start and stop."""
    seconds = 60 * config.getoption("--soak-minutes") + _AROUND_S
    for item in items:
        if item.path.name == "test_soak.py":
            item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server of a setup, and what its sixteen streams say when nothing happens."""
    setup: Setup = request.param
    folder = tmp_path_factory.mktemp(str(setup))
    path = model(setup, folder)
    with serve_for_faults(path, folder, *flags(setup)) as server:
        yield prepare(server, setup, path, random.Random(SEED))
