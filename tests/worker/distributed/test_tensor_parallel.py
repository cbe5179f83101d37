"""Two ranks over gloo, in processes of their own, against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_address
from support.ranks.spawn import run, run_checkpoints
from support.ranks.tensor_parallel import (
    SLICES,
    VARIANTS,
    addends,
    lonely_main,
    make_variant,
    run_steps,
    sum_main,
    waiting_main,
)
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from surestep_worker.startup.build import build_runner

pytestmark = pytest.mark.rotates(2, turn=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all variants, and the results of both ranks on all of them."""
    path = tmp_path_factory.mktemp("tp")
    for name in VARIANTS:
        make_variant(path, name)
    run_checkpoints(path, list(VARIANTS))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_equal_one(folder: Path, name: str) -> None:
    alone = run_steps(folder / name, TensorParallel())
    ranks = [torch.load(folder / f"rank{rank}.pt")[name] for rank in range(2)]
    vocab = VARIANTS[name].get("vocab", 384)
    for result in ranks:
        assert result["logits"].shape == alone["logits"].shape == (24, vocab)
        near = 2e-4 if name.startswith(("qwen3_", "gpt-oss", "deepseek")) else 1e-5
        assert (result["logits"] - alone["logits"]).abs().max().item() <= near
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    assert torch.equal(ranks[0]["fingerprints"], ranks[1]["fingerprints"])


def test_collectives(folder: Path) -> None:
    for rank in range(2):
        result = torch.load(folder / f"rank{rank}.pt")["collectives"]
        assert result["reduced"].tolist() == [[4.0] * 3] * 2
        assert result["gathered"].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 2
        first = [[1.0, 1.0, 2.0]] * 2 if rank == 0 else [[0.0] * 3] * 2
        assert result["first"].tolist() == first
        assert result["broadcast"].tolist() == [7]


@pytest.mark.parametrize("size", [2, 3])
def test_a_row_has_the_same_sum_among_any_rows(tmp_path: Path, size: int) -> None:
    address = free_address()
    run(sum_main, [(rank, size, address, tmp_path) for rank in range(size)])
    told = {(tmp_path / f"told{rank}").read_text() for rank in range(size)}
    assert told == {"; ".join(f"I am {rank}" for rank in range(size))}
    sums = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(size)]
    for dtype in (torch.float32, torch.bfloat16):
        expected = addends(0, 9, 33, dtype)
        for rank in range(1, size):
            expected += addends(rank, 9, 33, dtype)
        for first, last in SLICES:
            for of_rank in sums:
                assert torch.equal(of_rank[dtype, first, last], expected[first:last])


def test_a_group_that_never_completes_is_unavailable(tmp_path: Path) -> None:
    run(lonely_main, [(free_address(), tmp_path)])
    assert "rank 0 found no group of 2" in (tmp_path / "error").read_text()
    assert float((tmp_path / "waited").read_text()) < 20.0


def test_the_bound_of_a_collective_can_be_lowered(tmp_path: Path) -> None:
    address = free_address()
    run(waiting_main, [(rank, address, tmp_path) for rank in range(2)])
    assert 0.4 < float((tmp_path / "waited").read_text()) < 20.0


def test_alone_every_collective_is_a_no_op() -> None:
    tp, x = TensorParallel(), torch.arange(3)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x) is x
    assert tp.broadcast(x) is x
    tp.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = WorkerSettings(model=make_tiny_checkpoint(tmp_path), device="cuda")
    with pytest.raises(InvalidRequest, match="there is no CUDA device here"):
        build_runner(settings)


def test_a_model_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, heads=4, kv_heads=4)
    tp = TensorParallel()
    tp.size = 3
    with pytest.raises(InvalidRequest, match="tensor_parallel_size 3 does not divide 4 heads"):
        load_model(
            ModelSource(path), dtype="auto", device="cpu", tp=tp, kernels=load_kernels("cpu")
        )
