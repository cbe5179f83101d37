"""The FP8 cache of the C kernels: what is written, and what attention reads of it."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import (
    BLOCK_SIZE,
    COUNTS,
    DTYPES,
    LENGTHS,
    assert_close,
    attend,
    attends_alike_alone,
    batch_of,
    make_context,
    row_bounds,
    slots_of,
)
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8, LayerCache

SCALES = [None, (0.5, 3.0)]


def new_cache(kernels: KernelSet, blocks: int, heads: int, dims: int, scales: object) -> LayerCache:
    shape = kernels.kv_cache_shape(blocks, BLOCK_SIZE, heads, dims)
    k, v = (torch.full(shape, torch.nan).to(FP8) for _ in "kv")
    return LayerCache(k, v, None if scales is None else torch.tensor(scales))


def test_reads_every_code(native: KernelSet) -> None:
    """With one position the result is its value."""
    codes = torch.arange(256).to(torch.uint8).view(FP8).float().view(-1, 1, 8)
    cache = new_cache(native, 3, 1, 8, None)
    native.store_kv(torch.zeros_like(codes), codes, cache, torch.arange(32))
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    for place in range(32):
        at = torch.tensor([place // BLOCK_SIZE])
        start = torch.tensor([place % BLOCK_SIZE], dtype=torch.int32)
        rows = AttentionRows(tables, at, row_bounds([1]), start, 1)
        out = native.paged_attention(torch.zeros(1, 1, 8), cache, rows, 1.0, window=1)
        assert torch.equal(out.isnan(), codes[place : place + 1].isnan())
        assert torch.equal(out.nan_to_num(), codes[place : place + 1].nan_to_num())


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 24)])
def test_attends_as_the_reference_and_alike_in_any_window(
    native: KernelSet,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scales: tuple[float, float] | None,
    window: int,
) -> None:
    context = make_context(LENGTHS, kv_heads, head_dim, dtype)
    blocks = int(context.block_tables.max()) + 2
    q = torch.randn(sum(COUNTS), heads, head_dim).to(dtype)
    results = []
    for kernels in (native, reference):
        cache = new_cache(kernels, blocks, kv_heads, head_dim, scales)
        for row, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
            kernels.store_kv(k, v, cache, slots_of(context, row))
        made = attend(kernels, q, cache, batch_of(context), window=window)
        results.append(made)
        if kernels is native:
            assert attends_alike_alone(kernels, q, cache, context, made, window=window)
    assert_close(*results)
