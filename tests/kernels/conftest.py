"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.columns import triton_kernels
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_kernels.columns.cpu import compiling
from surestep_kernels.cpu import load_cpu
from surestep_kernels.table import REFERENCE
from torch import Tensor

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that Triton's interpreter runs, in thirds, as GPU tests where there is one."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "gpu" in getattr(item, "fixturenames", ()) or "triton" in params.values():
            item.add_marker("gpu" if HAS_GPU else pytest.mark.rotates(3))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of a test of Triton kernels: a GPU, or else the CPU, in the interpreter.

    What an op allocates and does not write is NaN.
    """
    if not HAS_GPU:
        from support.kernels.triton_interpreter import repair

        repair(monkeypatch)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    return "cuda" if HAS_GPU else "cpu"


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        fresh = allocate(*args, **kwargs)
        return fresh.fill_(torch.nan if fresh.dtype.is_floating_point else 0x55)

    return poisoned


@pytest.fixture(scope="session")
def reference() -> KernelSet:
    return REFERENCE


@pytest.fixture(scope="session")
def compiled() -> KernelSet:
    try:
        return load_cpu()
    except InvalidRequest as error:
        pytest.skip(str(error))


@pytest.fixture
def native(compiled: KernelSet) -> Iterator[KernelSet]:
    """The C kernels; the thread count that a test sets ends with it."""
    before = torch.get_num_threads()
    yield compiled
    compiled.set_num_threads(before)


@pytest.fixture
def few_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of one short file, where it matters only what becomes of a library."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text("int surestep_panel_width(void) { return 16; }\n")
    monkeypatch.setattr(compiling, "SOURCES", folder)
    return folder


@pytest.fixture(params=["c", "triton"])
def column(request: pytest.FixtureRequest) -> KernelSet:
    """Each column beside the reference. Triton's runs on a GPU, or in the interpreter."""
    return _column(request)


@pytest.fixture(params=["reference", "c", "triton"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Each column, for what holds of the reference as well."""
    return _column(request)


def _column(request: pytest.FixtureRequest) -> KernelSet:
    if request.param == "triton":
        return triton_kernels(request.getfixturevalue("gpu"))
    name = {"c": "native", "reference": "reference"}[request.param]
    found: KernelSet = request.getfixturevalue(name)
    return found
