from __future__ import annotations

import torch
from support.kernels.slots import i32, randint
from surestep_kernels import KernelSet
from surestep_kernels.write_runs import Runs


def test_writes_runs_and_nothing_else(column: KernelSet, reference: KernelSet) -> None:
    memory = torch.arange(5000, dtype=torch.int32)
    lengths = [1, 1500, 0, 37]
    words = randint(0, 1 << 30, sum(lengths))
    runs = Runs(i32(0, 2000, 3900, 4000), i32(0, 1, 1501, 1501, 1538), words, max(lengths))
    expected, actual = memory.clone(), memory.clone()
    reference.step.write_runs(expected, runs)
    column.step.write_runs(actual, runs)
    assert torch.equal(actual, expected)
    assert (expected[4000:4037] == words[-37:]).all()
