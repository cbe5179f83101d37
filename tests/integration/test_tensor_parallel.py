"""Two ranks over gloo, in processes of their own, against one."""

from __future__ import annotations

import socket
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing

from stepping import Row, pack
from surestep_common.errors import InvalidRequest, Unavailable
from surestep_kernels import load_kernels
from surestep_worker.digest import fingerprint
from surestep_worker.kv_cache import KVCache
from surestep_worker.models import load_model
from surestep_worker.tp import TensorParallel
from tiny import make_tiny_checkpoint

TIMEOUT_S = 60.0
VARIANTS: dict[str, dict[str, Any]] = {
    "split-kv-heads": {"kv_heads": 2, "vocab": 384},
    "shared-kv-head-odd-vocab": {"kv_heads": 1, "vocab": 385},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3-tied": {"family": "qwen3", "tie": True, "vocab": 383},
}
STEPS = (
    [Row([5, 9, 2, 7, 11], 0, (3, 1)), Row([8, 8, 1], 0, (2, 4))],
    [Row([4], 5, (3, 1)), Row([6, 382, 3], 3, (2, 4))],
)


@torch.inference_mode()
def run_steps(path: Path, tp: TensorParallel) -> dict[str, Tensor]:
    """Logits and fingerprint of every step."""
    kernels = load_kernels("cpu")
    model = load_model(path, dtype="auto", device="cpu", tp=tp, kernels=kernels)
    kv = KVCache(model.kv_spec(4), 5, kernels, "cpu")
    hidden = [model.forward(pack(rows, 4), kv) for rows in STEPS]
    return {
        "logits": torch.cat([model.logits(h) for h in hidden]),
        "fingerprints": torch.tensor([fingerprint(h) for h in hidden]),
    }


def rank_main(rank: int, address: str, folder: Path) -> None:
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, 2, address, "cpu", TIMEOUT_S)
    results = {name: run_steps(folder / name, tp) for name in VARIANTS}
    results["collectives"] = {
        "reduced": tp.all_reduce(torch.full((2, 3), 1.5 + rank, dtype=torch.bfloat16)),
        "gathered": tp.all_gather(torch.full((2, 2), float(rank))),
        "broadcast": tp.broadcast(torch.tensor([rank + 7])),
    }
    torch.save(results, folder / f"rank{rank}.pt")
    tp.close()


def lonely_main(address: str, folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(Unavailable, match="rank 0 found no group of 2"):
        TensorParallel.connect(0, 2, address, "cpu", timeout_s=1.0)
    (folder / "waited").write_text(f"{time.monotonic() - start}")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all variants, and the results of both ranks on all of them."""
    path = tmp_path_factory.mktemp("tp")
    for name, variant in VARIANTS.items():
        make_tiny_checkpoint(path / name, **variant)
    spawn, address = multiprocessing.get_context("spawn"), free_address()
    join_all([spawn.Process(target=rank_main, args=(rank, address, path)) for rank in range(2)])
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_equal_one(folder: Path, name: str) -> None:
    alone = run_steps(folder / name, TensorParallel())
    ranks = [torch.load(folder / f"rank{rank}.pt")[name] for rank in range(2)]
    vocab = VARIANTS[name].get("vocab", 384)
    for result in ranks:
        assert result["logits"].shape == alone["logits"].shape == (12, vocab)
        assert (result["logits"] - alone["logits"]).abs().max().item() <= 1e-5
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    assert torch.equal(ranks[0]["fingerprints"], ranks[1]["fingerprints"])


def test_collectives(folder: Path) -> None:
    for rank in range(2):
        result = torch.load(folder / f"rank{rank}.pt")["collectives"]
        assert result["reduced"].tolist() == [[4.0] * 3] * 2
        assert result["gathered"].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 2
        assert result["broadcast"].tolist() == [7]


def test_a_group_that_never_completes_is_unavailable(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    join_all([spawn.Process(target=lonely_main, args=(free_address(), tmp_path))])
    assert float((tmp_path / "waited").read_text()) < 20.0


def test_alone_every_collective_is_a_no_op() -> None:
    tp, x = TensorParallel(), torch.arange(3)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x) is x
    assert tp.broadcast(x) is x
    tp.close()


def test_a_model_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, heads=4, kv_heads=4)
    tp = TensorParallel()
    tp.size = 3
    with pytest.raises(InvalidRequest, match="tensor_parallel_size 3 does not divide 4 heads"):
        load_model(path, dtype="auto", device="cpu", tp=tp, kernels=load_kernels("cpu"))
