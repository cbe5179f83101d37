"""Steps that are captured: all kinds before the first step, or each when steps have missed it.

Without a GPU a captured step is called instead of replayed: see surestep_worker.step.graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from surestep_worker.step import graphs as graphs_module
from surestep_worker.step.graphs import Graphs
from surestep_worker.step.runner import Runner
from surestep_worker.step.step import StepLauncher


def graphs_of(runner: Runner) -> Graphs:
    """Those of a runner that has been prepared."""
    launcher = runner._launcher
    assert isinstance(launcher, StepLauncher)
    assert launcher._graphs is not None
    return launcher._graphs


@torch.inference_mode()
def capture_all(runner: Runner) -> None:
    """Whole steps and parts, of every bucket."""
    graphs = graphs_of(runner)
    for kind in graphs.kinds():
        assert graphs.capture(kind), kind


@contextmanager
def without_rest() -> Iterator[None]:
    """Steps that are missed are captured as soon as the scheduler orders it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs_module, "_SHARE", 1.0)
        yield
