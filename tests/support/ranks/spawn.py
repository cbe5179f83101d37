"""Starts the ranks of a test in processes of their own, and ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from support.processes.ports import free_address
from support.ranks.tensor_parallel import TIMEOUT_S, rank_main
from torch import multiprocessing

_CHECKPOINT_S = 25.0  # for one of several, where a busy machine compiles kernels first


@contextmanager
def started(
    main: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[list[SpawnProcess]]:
    """`main` in a process for each of `arguments`; whatever still runs in the end is killed."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=main, args=one) for one in arguments]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run(
    main: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout_s: float = TIMEOUT_S
) -> None:
    """Run `main` in a process for each of `arguments`, and wait for the success of all."""
    with started(main, arguments) as processes:
        for process in processes:
            process.join(timeout_s)
        assert [process.exitcode for process in processes] == [0] * len(processes)


def run_checkpoints(folder: Path, names: Sequence[str]) -> None:
    """Run the checkpoints `names` in `folder` on two ranks; they leave their results there."""
    address = free_address()
    ranks = [(rank, address, folder, names) for rank in range(2)]
    run(rank_main, ranks, timeout_s=TIMEOUT_S + _CHECKPOINT_S * len(names))
