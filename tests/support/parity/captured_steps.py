"""Steps that are captured: all kinds before the first step, or each when steps have missed it.

Without a GPU a captured step is called instead of replayed: see surestep_worker.step.graphs.
"""

from __future__ import annotations

import torch
from support.parity.local_engine import Results, Step
from surestep_proto import worker_pb2 as pb
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


def capturing(runner: Runner, step: Step) -> Step:
    """Steps behind each of which one kind is captured that steps have missed."""

    def stepped(plan: pb.StepPlan) -> Results:
        results = step(plan)
        if graphs_of(runner)._missed:
            runner.capture_next()
        return results

    return stepped
