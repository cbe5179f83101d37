"""What one rank of the tests of collectives on GPUs runs; a module of its own, to import little."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import torch
from support.ranks.tensor_parallel import TIMEOUT_S, addends
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.step.transfer import Download, Packed
from torch import Tensor

WIDTH = 2048
ROWS = (4500, 1, 7, 600)  # in one shot, in two, and in more pieces than one
DTYPES = (torch.float32, torch.bfloat16)


def gpu_main(rank: int, size: int, address: str, folder: Path) -> None:
    """Use every collective, eagerly and from a graph, and leave the results in `folder`."""
    torch.cuda.set_device(rank)
    tp = TensorParallel.connect(rank, size, address, "cuda", TIMEOUT_S)
    results: dict[str, object] = {
        "on the host": tp.all_reduce(torch.tensor([rank + 1])),
        "broadcast on the host": tp.broadcast(torch.tensor([rank + 7])),
        "sums": {(dtype, rows): _sum(tp, rank, dtype, rows) for dtype in DTYPES for rows in ROWS},
        "replayed": _replay(tp, rank),
        "opened": _opened_by_waiting(rank),
    }
    torch.save(results, folder / f"rank{rank}.pt")
    tp.close()


def _sum(tp: TensorParallel, rank: int, dtype: torch.dtype, rows: int) -> Tensor:
    x = addends(rank, max(ROWS), WIDTH, dtype)[:rows]
    return tp.all_reduce(x.cuda()).cpu()


def _opened_by_waiting(rank: int) -> set[int]:
    """GPUs on which a thread opens a context that waits for what this rank's has computed."""
    before = _contexts()
    download = Download(Packed.of([torch.full((3,), rank, device="cuda")]))
    thread = Thread(target=download.wait)
    thread.start()
    thread.join()
    return _contexts() - before


def _contexts() -> set[int]:
    has_one: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return {i for i in range(torch.cuda.device_count()) if has_one(i)}


def _replay(tp: TensorParallel, rank: int) -> list[Tensor]:
    """Sum, logits and ids of a graph that is captured with other values than it is replayed with."""
    x, ids = torch.zeros(7, WIDTH, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        total = tp.all_reduce(x.clone())
        return [total, tp.gather_to_first(x[:2, :4], 4 * tp.size), tp.broadcast(ids.clone())]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    x.copy_(addends(rank, 7, WIDTH, torch.float32))
    ids.fill_(rank + 5)
    graph.replay()
    return [result.cpu() for result in results]
