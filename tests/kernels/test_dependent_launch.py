"""Programmatic dependent launch: who asks for it, and who gets it. What compiled kernels do with it
is asked in test_gpu_compiles.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from gpu import dependent_launch as gpu_dependent_launch
from gpu.sizes import Case, Work
from surestep_common.errors import InvalidRequest
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, use_dependent_launches
from surestep_proto import worker_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.built import log_facts
from surestep_worker.startup.choose_kernels import _choose_launches
from torch import Tensor


@pytest.fixture(autouse=True)
def _as_ever() -> Iterator[None]:
    yield
    use_dependent_launches(enabled=False)


def _options(**options: Any) -> dict[str, Any]:
    return options


KERNEL = DependentKernel({(4,): _options})  # a launch with this grid tells its options


def test_launches_have_the_option_from_when_it_is_wanted_until_it_is_not() -> None:
    assert KERNEL[4,](num_warps=2) == {"num_warps": 2}
    use_dependent_launches(enabled=True)
    assert KERNEL[4,](num_warps=2) == {"num_warps": 2, "launch_pdl": True}
    use_dependent_launches(enabled=False)
    assert KERNEL[4,]() == {}


def test_a_worker_says_what_its_setting_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    _choose_launches(WorkerSettings(device="cpu", programmatic_dependent_launch=True))
    assert KERNEL[4,]() == {"launch_pdl": True}
    with caplog.at_level(logging.INFO):
        log_facts(pb.WorkerInfo(programmatic_dependent_launch=True))
    assert caplog.messages[-1].endswith("programmatic dependent launch")
    caplog.clear()
    _choose_launches(WorkerSettings(device="cpu"))
    assert KERNEL[4,]() == {}
    with caplog.at_level(logging.INFO):
        log_facts(pb.WorkerInfo())
    assert "programmatic" not in caplog.text


@pytest.mark.parametrize(
    ("cuda", "capability", "served"),
    [
        ("12.8", (9, 0), True),
        ("12.8", (12, 0), True),
        ("12.8", (8, 9), False),
        (None, (9, 4), False),
    ],
)
def test_a_gpu_without_it_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    use_dependent_launches(enabled=False)
    if served:
        use_dependent_launches(enabled=True)
        return
    with pytest.raises(InvalidRequest, match="this GPU has no") as raised:
        use_dependent_launches(enabled=True)
    assert raised.value.param == "programmatic_dependent_launch"


@dataclass
class _Given:
    x: Tensor


def _adds(x: _Given, differs: Callable[[], float]) -> tuple[Tensor]:
    x.x += differs()
    return (x.x[0],)


def _case(differs: Callable[[], float]) -> Case:
    def make(device: str) -> Work:
        given = _Given(torch.zeros(3, device=device))
        return Work(partial(_adds, given, differs), 0)

    return Case("add", "3", make)


def test_the_benchmark_tells_what_differs_from_what_always_does() -> None:
    count = iter(range(10))
    cases = {
        "same": (lambda: 1.0, True, 2),
        "other": (lambda: float(bool(KERNEL[4,]())), False, 2),
        "never alike": (lambda: float(next(count)), True, 0),
    }
    for name, (differs, equal, repeatable) in cases.items():
        found = gpu_dependent_launch._compare(_case(differs), "cpu")
        assert found == {"tensors": 2, "repeatable": repeatable, "equal": equal}, name
