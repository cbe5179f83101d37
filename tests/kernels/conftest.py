"""Fixtures of the kernel tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from surestep_kernels import KernelSet
from surestep_kernels.dispatch import REFERENCE, load_native

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined


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
