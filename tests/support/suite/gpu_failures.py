"""A plugin for tests on a GPU whose session may be cut short: `-p support.suite.gpu_failures --failures FILE`.

Each failure is in the file as soon as it has happened. After a CUDA error nothing works any more in
its process, so that a worker of xdist ends with it, and another one goes on with the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

POISONED = ("CUDA error", "CUDA driver error", "AcceleratorError", "illegal memory access")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where failures go."""
    parser.addoption("--failures", type=Path, required=True, help="a file to append failures to")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Before anybody else sees the report: its process may not live to send it."""
    report = yield
    if report.failed:
        with item.config.getoption("--failures").open("a") as file:
            file.write(f"=== {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        is_worker = hasattr(item.config, "workerinput")
        if is_worker and any(sign in report.longreprtext for sign in POISONED):
            os._exit(1)
    return report
