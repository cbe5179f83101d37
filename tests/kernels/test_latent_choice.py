"""The choice of positions: as the reference, and bit for bit as if alone."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import row_bounds
from support.kernels.latents import BLOCK_SIZE, COUNTS, KEY, TOP_K, TYPES, Sequences, tokens
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows

TOKENS = sum(COUNTS)


@pytest.mark.parametrize(
    ("column", "heads"),
    [("c", 1), ("c", 6), ("c", 32), ("triton", 3), ("triton", 32)],
    indirect=["column"],
)
@pytest.mark.parametrize(("dtype", "page_dtype"), TYPES, ids=str)
def test_equals_the_reference_and_is_the_same_alone(
    column: KernelSet,
    reference: KernelSet,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    heads: int,
) -> None:
    sequences, q = Sequences(KEY, page_dtype), torch.randn(TOKENS, heads, KEY).to(dtype)
    rows, pages = sequences.rows(), sequences.pages
    weights = torch.randn(TOKENS, heads).abs() + 0.1  # greater scores than 0 are not equal
    chosen = column.latent.choose(q, weights, pages, rows, TOP_K)
    expected = reference.latent.choose(q, weights, pages, rows, TOP_K)
    if column.name == "C":  # what lies behind those that a token sees is of no meaning
        assert torch.equal(chosen, expected)
    for token, row, i in tokens(rows):
        line, one = slice(token, token + 1), sequences.alone(rows, row, i)
        seen = min(int(one.start[0]) + 1, TOP_K)
        assert torch.equal(chosen[token, :seen], expected[token, :seen])
        if seen < TOP_K:
            assert chosen[token, :seen].tolist() == list(range(seen))
        if token % 5 == 0:
            alone = column.latent.choose(q[line], weights[line], pages, one, TOP_K)
            assert torch.equal(alone[0, :seen], chosen[token, :seen])


def test_the_lowest_positions_win_ties(kernels: KernelSet) -> None:
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
    for top_k, expected in ((1, [40]), (2, [17, 40]), (5, [0, 1, 17, 40, 63])):
        assert kernels.latent.choose(q, weights, pages, rows, top_k).tolist() == [expected]
    least = kernels.latent.choose(q, weights, pages, rows, 63)[0].tolist()
    assert least == [p for p in range(64) if p != 3]
