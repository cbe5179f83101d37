"""Latent attention and the choice of positions in Triton: as the reference, and as if alone."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, row_bounds
from support.kernels.latents import (
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
from surestep_kernels.latent_attention.triton import attend
from surestep_kernels.latent_choice.triton import choose
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8

TOKENS = sum(COUNTS)


def on(device: str, rows: AttentionRows) -> AttentionRows:
    tables, slots, cu_rows, start = (column.to(device) for column in rows[:4])
    return AttentionRows(tables, slots, cu_rows, start, rows.max_tokens)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("heads", [4, 19])
@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
def test_attention(
    gpu: str, reference: KernelSet, dtype: torch.dtype, heads: int, sparse: bool
) -> None:
    wide = torch.float32 if dtype is FP8 else dtype
    sequences, q = Sequences(WIDTH, dtype), torch.randn(TOKENS, heads, WIDTH).to(wide)
    rows, chosen = sequences.rows(), None
    if sparse:
        keys, index = Sequences(KEY, dtype), torch.randn(TOKENS, 3, KEY).to(wide)
        on_keys = rows._replace(block_tables=keys.tables)
        weights = torch.randn(TOKENS, 3)
        chosen = ops_of(reference).choose(index, weights, keys.pages, on_keys, TOP_K)
    expected = ops_of(reference).attend(q, sequences.pages, rows, 0.3, VALUES, chosen)
    q, pages = q.to(gpu), sequences.pages.to(gpu)
    chosen = None if chosen is None else chosen.to(gpu)
    out = attend(q, pages, on(gpu, rows), 0.3, VALUES, chosen)
    assert_close(out.cpu(), expected)
    for token, row, i in tokens(rows)[::3]:
        line = slice(token, token + 1)
        one, few = on(gpu, sequences.alone(rows, row, i)), None if chosen is None else chosen[line]
        assert torch.equal(attend(q[line], pages, one, 0.3, VALUES, few)[0], out[token])


@pytest.mark.parametrize("heads", [3, 32])
@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
def test_choice(gpu: str, reference: KernelSet, dtype: torch.dtype, heads: int) -> None:
    wide = torch.float32 if dtype is FP8 else dtype
    sequences, q = Sequences(KEY, dtype), torch.randn(TOKENS, heads, KEY).to(wide)
    rows, weights = sequences.rows(), torch.randn(TOKENS, heads).abs() + 0.1
    expected = ops_of(reference).choose(q, weights, sequences.pages, rows, TOP_K)
    q, weights, pages = q.to(gpu), weights.to(gpu), sequences.pages.to(gpu)
    chosen = choose(q, weights, pages, on(gpu, rows), TOP_K)
    for token, row, i in tokens(rows):
        line, one = slice(token, token + 1), on(gpu, sequences.alone(rows, row, i))
        seen = min(int(one.start[0]) + 1, TOP_K)
        assert torch.equal(chosen[token, :seen].cpu(), expected[token, :seen])
        if token % 3 == 0:
            alone = choose(q[line], weights[line], pages, one, TOP_K)
            assert torch.equal(alone[0, :seen], chosen[token, :seen])


def test_the_lowest_positions_win_ties(gpu: str) -> None:
    """Most scores are 0, of both signs; a few are greater or less."""
    pages, size = torch.zeros(10, 8, KEY), 8
    for position, value in ((3, -1.0), (17, 1.0), (40, 2.0), (63, 1.0), (66, 1.0)):
        pages[1 + position // size, position % size, 0] = value
    start = torch.tensor([63], dtype=torch.int32)
    table, slot = torch.arange(1, 10).int()[None], torch.zeros(1, dtype=torch.int64)
    rows = on(gpu, AttentionRows(table, slot, row_bounds([1]), start, 1))
    q = torch.zeros(1, 2, KEY)
    q[0, :, 0] = torch.tensor([1.0, -1.0])  # the second head scores what is less than 0
    weights = torch.tensor([[1.0, -1.0]], device=gpu)
    for top_k, expected in ((1, [40]), (2, [17, 40]), (5, [0, 1, 17, 40, 63])):
        chosen = choose(q.to(gpu), weights, pages.to(gpu), rows, top_k)
        assert chosen.tolist() == [expected]
    least = choose(q.to(gpu), weights, pages.to(gpu), rows, 63)[0].tolist()
    assert least == [p for p in range(64) if p != 3]


def test_tokens_of_no_row(gpu: str, reference: KernelSet) -> None:
    """Rows without tokens, and tokens behind the last row, disturb no others."""
    sequences = Sequences(WIDTH, torch.float32)
    rows = sequences.rows()
    q = torch.randn(TOKENS + 3, 4, WIDTH)
    empty = rows._replace(
        slots=torch.cat((rows.slots, rows.slots[:1])),
        cu_rows=torch.cat((rows.cu_rows, rows.cu_rows[-1:])),
        start=torch.cat((rows.start, rows.start[:1])),
    )
    out = attend(q.to(gpu), sequences.pages.to(gpu), on(gpu, empty), 0.3, VALUES)
    expected = ops_of(reference).attend(q, sequences.pages, rows, 0.3, VALUES)
    assert_close(out[:TOKENS].cpu(), expected[:TOKENS])
