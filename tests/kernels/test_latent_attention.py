"""Latent attention and the choice of positions: as the reference, and bit for bit as if alone."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, row_bounds
from support.kernels.latents import (
    BLOCK_SIZE,
    COUNTS,
    KEY,
    TOP_K,
    VALUES,
    WIDTH,
    Sequences,
    ops_of,
    tokens,
)
from surestep_kernels import KernelSet
from surestep_kernels.latent_attention import store_latents
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8
from torch import Tensor


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 11])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype, fp8: bool, heads: int, sparse: bool
) -> None:
    sequences = Sequences(WIDTH, FP8 if fp8 else dtype)
    rows, q = sequences.rows(), torch.randn(sum(COUNTS), heads, WIDTH).to(dtype)
    chosen = None
    if sparse:
        keys, index = Sequences(KEY, dtype), torch.randn(sum(COUNTS), 3, KEY).to(dtype)
        rows = rows._replace(block_tables=keys.tables)
        chosen = ops_of(native).choose(index, torch.randn(sum(COUNTS), 3), keys.pages, rows, TOP_K)
        rows = rows._replace(block_tables=sequences.tables)
    out = ops_of(native).attend(q, sequences.pages, rows, 0.3, VALUES, chosen)
    assert_close(out, ops_of(reference).attend(q, sequences.pages, rows, 0.3, VALUES, chosen))
    for token, row, i in tokens(rows):
        one, line = (
            sequences.alone(rows, row, i),
            None if chosen is None else chosen[token : token + 1],
        )
        alone = ops_of(native).attend(q[token : token + 1], sequences.pages, one, 0.3, VALUES, line)
        assert torch.equal(alone[0], out[token])


@pytest.mark.parametrize("heads", [1, 6, 32])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choice(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype, fp8: bool, heads: int
) -> None:
    sequences = Sequences(KEY, FP8 if fp8 else dtype)
    rows, q = sequences.rows(), torch.randn(sum(COUNTS), heads, KEY).to(dtype)
    weights = torch.randn(sum(COUNTS), heads).abs() + 0.1  # greater scores than 0 are not equal
    chosen = ops_of(native).choose(q, weights, sequences.pages, rows, TOP_K)
    assert torch.equal(chosen, ops_of(reference).choose(q, weights, sequences.pages, rows, TOP_K))
    for token, row, i in tokens(rows):
        one = sequences.alone(rows, row, i)
        line = slice(token, token + 1)
        alone = ops_of(native).choose(q[line], weights[line], sequences.pages, one, TOP_K)
        assert torch.equal(alone[0], chosen[token])
        seen = int(one.start[0]) + 1
        if seen <= TOP_K:
            assert chosen[token, :seen].tolist() == list(range(seen))


def test_the_lowest_positions_win_ties(native: KernelSet, reference: KernelSet) -> None:
    """Most scores are 0, of both signs; a few are greater or less."""
    pages = torch.zeros(10, BLOCK_SIZE, KEY)
    for position, value in ((3, -1.0), (17, 1.0), (40, 2.0), (63, 1.0), (66, 1.0)):
        pages[1 + position // BLOCK_SIZE, position % BLOCK_SIZE, 0] = value
    table = torch.arange(1, 9).int()[None]
    start = torch.tensor([63], dtype=torch.int32)
    rows = AttentionRows(table, torch.zeros(1, dtype=torch.int64), row_bounds([1]), start, 1)
    q = torch.zeros(1, 2, KEY)
    q[0, :, 0] = torch.tensor([1.0, -1.0])  # the second head scores what is less than 0
    weights = torch.tensor([[1.0, -1.0]])
    for kernels in (native, reference):
        for top_k, expected in ((1, [40]), (2, [17, 40]), (5, [0, 1, 17, 40, 63])):
            chosen = ops_of(kernels).choose(q, weights, pages, rows, top_k)
            assert chosen.tolist() == [expected]
        least = ops_of(kernels).choose(q, weights, pages, rows, 63)[0].tolist()
        assert least == [p for p in range(64) if p != 3]


def test_every_number_of_fp8_is_read(native: KernelSet) -> None:
    """One key and one position: what is attended is the value, NaN and what is saturated included."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).view(1, 1, 256)
    rows = AttentionRows(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        row_bounds([1]),
        torch.zeros(1, dtype=torch.int32),
        1,
    )
    numbers = codes.flatten().float()
    finite = torch.where(numbers.isnan(), 0.0, numbers).to(FP8).view(1, 1, 256)
    q = torch.zeros(1, 1, 256)
    out = ops_of(native).attend(q, finite, rows, 1.0, 256).flatten()
    assert torch.equal(out, finite.flatten().float())
    assert ops_of(native).attend(q, codes, rows, 1.0, 256).isnan().all()
    store_latents(
        torch.tensor([[1e9, -1e9, torch.nan]]),
        stored := torch.zeros(1, 1, 3).to(FP8),
        torch.zeros(1, dtype=torch.int64),
    )
    assert stored.float().flatten()[:2].tolist() == [448.0, -448.0]
    assert stored.float().flatten()[2].isnan()


def test_threads_change_nothing(native: KernelSet) -> None:
    sequences = Sequences(KEY, torch.float32)
    rows, q = sequences.rows(), torch.randn(sum(COUNTS), 32, KEY)
    weights, results = torch.randn(sum(COUNTS), 32), list[Tensor]()
    for threads in (1, 3):
        native.set_num_threads(threads)
        chosen = ops_of(native).choose(q, weights, sequences.pages, rows, TOP_K)
        results.append(ops_of(native).attend(q, sequences.pages, rows, 0.3, 16, chosen))
    native.set_num_threads(1)
    assert torch.equal(*results)
