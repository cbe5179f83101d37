"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from surestep_kernels import KernelSet
from surestep_kernels.dispatch import REFERENCE, load_native


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.fixture(scope="session")
def reference() -> KernelSet:
    return REFERENCE


@pytest.fixture(scope="session")
def compiled() -> KernelSet:
    kernels = load_native()
    if kernels is None:
        pytest.skip("no C compiler here")
    return kernels


@pytest.fixture
def native(compiled: KernelSet) -> Iterator[KernelSet]:
    """The C kernels; the thread count that a test sets ends with it."""
    before = torch.get_num_threads()
    yield compiled
    compiled.set_num_threads(before)
