"""Two real ranks in processes of their own; plans go in and results come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from support.parity.bench import Neighbours, build_runner, load
from support.parity.captured_steps import without_rest
from support.parity.drafters import TRUTH
from support.parity.latent_models import LATENT_RANK_MUTANTS
from support.parity.local_engine import Step
from support.parity.mutants import RANK_MUTANTS
from support.parity.triton_engine import build_triton_engine
from support.ranks.spawn import started
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import worker_pb2 as pb
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup.built import Built

START_S = 120.0
STEP_S = 10.0


class RankFailed(Exception):
    """A rank raised, or did not answer in STEP_S."""


class RankSetup(NamedTuple):
    """Setup that every rank is told."""

    folder: Path
    address: str
    neighbours: Neighbours
    drafter: str
    k: int
    truth: list[list[int]]  # for the drafters that know it
    mutant: str  # of rank 1; empty = none
    # As on a CPU; as on a GPU, with torch's ops; the same, captured; on a GPU.
    steps: Literal["cpu", "device", "captured", "gpu"] = "cpu"
    expert_parallel: bool = False
    implementation: str = "auto"


def rank_main(rank: int, setup: RankSetup, pipe: Connection) -> None:
    """Answer plans until the pipe closes, and with the facts where there is none."""
    torch.set_num_threads(1)
    if rank == 1 and setup.mutant:
        (RANK_MUTANTS | LATENT_RANK_MUTANTS)[setup.mutant](pytest.MonkeyPatch())
    TRUTH.learn(setup.truth, vocab_size=2, stop_id=0)
    built = build(rank, setup)
    if setup.steps in ("captured", "gpu"):
        built.runner.prepare()
    built.runner.open(1)
    with without_rest():
        while True:
            answer: pb.StepResult | pb.WorkerInfo = built.facts
            if message := pipe.recv_bytes():
                answer = built.runner.step(pb.StepPlan.FromString(message))
            built.facts.captured_shapes = built.runner.captured[0]
            pipe.send_bytes(answer.SerializeToString())


def build(rank: int, setup: RankSetup) -> Built:
    """Join the other rank and load the model."""
    what = setup.neighbours, setup.drafter, setup.k
    if setup.steps == "gpu":
        torch.cuda.set_device(rank)
        tp = TensorParallel.connect(rank, 2, setup.address, "cuda", START_S)
        return build_triton_engine(setup.folder, tp, *what)
    tp = TensorParallel.connect(rank, 2, setup.address, "cpu", START_S)
    ops = None if setup.steps == "cpu" else STEP_REFERENCE
    model = load(
        setup.folder,
        tp,
        expert_parallel=setup.expert_parallel,
        implementation=setup.implementation,
    )
    return build_runner(model, tp, *what, ops, setup.folder)


@contextmanager
def two_ranks(setup: RankSetup) -> Iterator[tuple[Step, pb.WorkerInfo]]:
    """A step function over both ranks, and the facts of rank 0."""
    with asked_ranks(setup) as (step, facts):
        yield step, facts()[0]


@contextmanager
def asked_ranks(setup: RankSetup) -> Iterator[tuple[Step, Callable[[], list[pb.WorkerInfo]]]]:
    """A step function over both ranks, and one that asks them for their facts."""
    pipes = [Pipe() for _ in range(2)]
    ours, theirs = zip(*pipes, strict=True)

    def step(plan: pb.StepPlan) -> list[pb.StepResult]:
        for pipe in ours:
            pipe.send_bytes(plan.SerializeToString())
        return [pb.StepResult.FromString(message) for message in _answers(ours, STEP_S)]

    def facts() -> list[pb.WorkerInfo]:
        for pipe in ours:
            pipe.send_bytes(b"")
        return [pb.WorkerInfo.FromString(message) for message in _answers(ours, START_S)]

    with started(rank_main, [(rank, setup, pipe) for rank, pipe in enumerate(theirs)]):
        for pipe in theirs:
            pipe.close()  # or the end of a rank would not be seen
        yield step, facts


def _answers(pipes: Sequence[Connection], timeout_s: float) -> list[bytes]:
    messages = []
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(timeout_s):
                raise RankFailed(f"rank {rank} did not answer in {timeout_s} s")
            messages.append(pipe.recv_bytes())
        except EOFError:
            raise RankFailed(f"rank {rank} ended") from None
    return messages
