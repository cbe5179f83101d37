"""What holds for every test: clean environment, shown seeds, poisoned memory, skips with reason."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import _pytest.runner
import pytest
import torch
from _pytest.outcomes import TEST_OUTCOME
from hypothesis import HealthCheck, settings

# Where a fixture's end is cancelled, pytest would skip those of all other fixtures, in every later test too.
setattr(_pytest.runner, "TEST_OUTCOME", (*TEST_OUTCOME, asyncio.CancelledError))  # noqa: B010

pytest_plugins = ["support.suite.rotation"]
SEED = 20_260_131
GPU = Path("/dev/nvidiactl")
HAS_CUDA = torch.cuda.is_available()

# Read when Triton is imported, by whoever is first. What asks for a GPU also asks torch.
os.environ["TRITON_INTERPRET"] = "0" if HAS_CUDA else "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default; Triton 3.9 warns if unset

# How long an example takes is the machine's affair. A failure says how it is repeated.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What takes long, and what is kept of it."""
    text = "a folder for what test_gpu_compiles.py finds: a file of JSON for each Triton and target"
    parser.addoption("--compile-report", type=Path, help=text)
    text = (
        "minutes of traffic with faults in tests/promises/recovery/test_soak.py; 0 = the short form"
    )
    parser.addoption("--soak-minutes", type=float, default=0.0, help=text)


def pytest_report_header() -> str:
    """The seed belongs to every failure report."""
    return f"seed: {SEED}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Servers of the fault suite are started once, not once per worker."""
    from support.suite.sharing import ByServer

    return ByServer(config, log) if config.getvalue("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have to say at the end, passed or failed."""
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, text in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(text)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and say so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not HAS_CUDA:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell reaches a test."""
    for name in [name for name in os.environ if name.startswith("SURESTEP_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test runs on a GPU where it says so, not where there happens to be one."""
    if GPU.exists():
        monkeypatch.setattr("surestep_worker.config.GPU", Path("/nonexistent"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, so that reading what nobody wrote is seen."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(tensor: Any) -> Any:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
