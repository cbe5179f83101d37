"""Ranks on GPUs of one machine: NCCL, peer memory and gloo behind one set of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.processes.ports import free_address
from support.ranks.gpu_collectives import DTYPES, ROWS, WIDTH, gpu_main
from support.ranks.spawn import run
from support.ranks.tensor_parallel import addends
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The results of every rank."""
    size: int = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    address, folder = free_address(), tmp_path_factory.mktemp("ranks")
    run(gpu_main, [(rank, size, address, folder) for rank in range(size)])
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def in_order_of_ranks(size: int, dtype: torch.dtype) -> Tensor:
    total = addends(0, max(ROWS), WIDTH, dtype)
    for rank in range(1, size):
        total += addends(rank, max(ROWS), WIDTH, dtype)
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_sum_among_any_rows(
    ranks: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    expected = in_order_of_ranks(len(ranks), dtype)
    for rank in ranks:
        for rows in ROWS:
            assert torch.equal(rank["sums"][dtype, rows], expected[:rows])


def test_a_graph_holds_the_collectives(ranks: list[dict[str, Any]]) -> None:
    own = [addends(rank, 7, WIDTH, torch.float32) for rank in range(len(ranks))]
    logits = torch.cat([x[:2, :4] for x in own], dim=-1)
    for i, rank in enumerate(ranks):
        total, gathered, ids = rank["replayed"]
        assert torch.equal(total, sum(own[1:], start=own[0]))
        assert torch.equal(gathered, logits * (i == 0))
        assert ids.tolist() == [5, 5, 5]


def test_what_is_on_the_host_stays_there(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["on the host"].tolist() == [sum(range(len(ranks) + 1))]
        assert rank["broadcast on the host"].tolist() == [7]


def test_who_waits_for_a_rank_opens_no_context_on_another_ones_gpu(
    ranks: list[dict[str, Any]],
) -> None:
    """Half a GiB for each rank, on GPU 0, after that has measured its memory."""
    assert [rank["opened"] for rank in ranks] == [set()] * len(ranks)
