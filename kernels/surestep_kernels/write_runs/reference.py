"""Write the differences of a plan into the slots of a device in one launch."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

from torch import Tensor

from surestep_kernels.step_columns import Column


class Runs(NamedTuple, Generic[Column]):
    """G runs of words, cut by the host. No two runs overlap."""

    to: Column  # i32[G] first word of the memory that is written
    cu: Column  # i32[G+1] run g is words[cu[g]:cu[g+1]]
    words: Column  # i32[..]
    longest: int  # words of the longest run: sizes the launch


class WriteRuns(Protocol):
    def __call__(self, memory: Tensor, runs: Runs) -> None: ...


def write_runs_reference(memory: Tensor, runs: Runs) -> None:
    """Copy each run to its place in memory i32[M]."""
    ends = runs.cu.tolist()
    for to, begin, end in zip(runs.to.tolist(), ends, ends[1:], strict=False):
        memory[to : to + end - begin] = runs.words[begin:end]
