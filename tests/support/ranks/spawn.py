"""Starts the ranks of the tensor-parallel tests in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path

from support.processes.ports import free_address
from support.ranks.tensor_parallel import TIMEOUT_S, rank_main
from torch import multiprocessing


def run_ranks(folder: Path, names: Sequence[str]) -> None:
    """Run the checkpoints `names` in `folder` on two ranks; they leave their results there."""
    spawn, address = multiprocessing.get_context("spawn"), free_address()
    ranks = [(rank, address, folder, names) for rank in range(2)]
    join_all([spawn.Process(target=rank_main, args=arguments) for arguments in ranks])


def join_all(processes: list[SpawnProcess]) -> None:
    """Wait for success of all; whatever still runs in the end is killed."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
