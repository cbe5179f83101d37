from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.cases import (
    DTYPES,
    Context,
    assert_close,
    fill_cache,
    make_context,
    row_bounds,
)
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

HEADS = [(9, 3, 64), (4, 4, 8), (8, 1, 128), (14, 2, 24)]  # query heads, KV heads, head_dim
LENGTHS = [1, 5, 16, 17, 64, 70, 150, 333]  # positions that the last token of a row sees
COUNTS = [1, 1, 5, 17, 1, 3, 100, 2]  # tokens of the row
WINDOWS = [1, 7, 8, 16, 64, 65, 100, 128, 1000]  # spans of 64 positions, and groups of 8


def attend(
    kernels: KernelSet,
    q: Tensor,
    cache: LayerCache,
    context: Context,
    rows: list[tuple[int, int, int]],
    **options: Any,
) -> Tensor:
    """Attention of rows (context row, start, tokens), whose queries follow each other in q."""
    slots = torch.tensor([row for row, _, _ in rows])
    start = torch.tensor([start for _, start, _ in rows], dtype=torch.int32)
    counts = [count for _, _, count in rows]
    batch = AttentionRows(context.block_tables, slots, row_bounds(counts), start, max(counts))
    return kernels.paged_attention(q, cache, batch, q.shape[2] ** -0.5, **options)


def all_rows(lengths: list[int], counts: list[int]) -> list[tuple[int, int, int]]:
    return [(row, n - c, c) for row, (n, c) in enumerate(zip(lengths, counts, strict=True))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_equals_the_reference_and_never_sees_unused_pages(
    native: KernelSet,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    context = make_context(LENGTHS, kv_heads, head_dim, dtype)  # NaN wherever nothing was stored
    q = torch.randn(sum(COUNTS), heads, head_dim).to(dtype)
    expected, actual = (
        attend(kernels, q, fill_cache(kernels, context), context, all_rows(LENGTHS, COUNTS))
        for kernels in (reference, native)
    )
    assert actual.isfinite().all()
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_sliding_window_and_sinks(
    native: KernelSet, reference: KernelSet, window: int, dtype: torch.dtype
) -> None:
    context = make_context(LENGTHS, 2, 24, dtype)
    for row, start, _ in all_rows(LENGTHS, COUNTS):  # what no token of the row sees
        for part in (context.k, context.v):
            part[row][: max(0, start + 1 - window)] = torch.nan
    q, sinks = torch.randn(sum(COUNTS), 6, 24).to(dtype), torch.tensor([-3.0, 0.5, 9, -40, 40, 0])
    for options in ({"window": window}, {"window": window, "sinks": sinks}, {"sinks": sinks}):
        held = context if "window" in options else make_context(LENGTHS, 2, 24, dtype)
        expected, actual = (
            attend(k, q, fill_cache(k, held), held, all_rows(LENGTHS, COUNTS), **options)
            for k in (reference, native)
        )
        assert actual.isfinite().all()
        assert_close(actual, expected)


def test_a_sink_is_a_logit_without_a_value(reference: KernelSet) -> None:
    context = make_context([40], 1, 16, torch.float32)
    q, sinks = torch.randn(7, 2, 16), torch.tensor([0.5, -2.0])
    cache = fill_cache(reference, context)
    actual = attend(reference, q, cache, context, [(0, 33, 7)], sinks=sinks, window=9)
    scores = torch.einsum("qhd,ld->hql", q, context.k[0][:, 0]) / 4
    distance = torch.arange(33, 40)[:, None] - torch.arange(40)
    scores = scores.masked_fill((distance < 0) | (distance > 8), float("-inf")).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    assert_close(actual, torch.einsum("hql,ld->qhd", weights, context.v[0][:, 0]))


def test_the_reference_equals_dense_attention(reference: KernelSet) -> None:
    context = make_context([40], 3, 16, torch.float32)
    q = torch.randn(7, 9, 16)
    actual = attend(reference, q, fill_cache(reference, context), context, [(0, 33, 7)])
    k, v = (x[0].repeat_interleave(3, dim=1).transpose(0, 1) for x in (context.k, context.v))
    mask = torch.ones(7, 40, dtype=torch.bool).tril(33)
    dense = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask)
    assert_close(actual, dense.transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 5, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_decode_windows_and_prefill_agree_bit_for_bit(
    native: KernelSet, heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    """Any cut of a sequence into rows, beside any neighbours, gives the bits of one prefill."""
    length = 210
    context = make_context([length, 90], kv_heads, head_dim, dtype)
    cache = fill_cache(native, context)
    q = torch.randn(length, heads, head_dim).to(dtype)
    neighbour = torch.randn(30, heads, head_dim).to(dtype)
    options = {"window": window, "sinks": torch.randn(heads)} if window else {}
    native.set_num_threads(2)
    whole = attend(native, q, cache, context, [(0, 0, length)], **options)
    for trial in range(30):
        native.set_num_threads(1 + trial % 3)
        first = int(torch.randint(0, length, ()))
        count = int(torch.randint(1, min(length - first, [1, 6, 80][trial % 3]) + 1, ()))
        mixed = torch.cat((neighbour, q[first : first + count]))
        rows = [(1, 60, 30), (0, first, count)]
        out = attend(native, mixed, cache, context, rows, **options)
        assert torch.equal(out[30:], whole[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_prompt_gives_the_bits_of_its_tokens_alone(
    native: KernelSet, dtype: torch.dtype
) -> None:
    """Of many tokens, larger tiles are made."""
    length = 850
    context = make_context([length], 2, 24, dtype)
    cache, q = fill_cache(native, context), torch.randn(length, 6, 24).to(dtype)
    native.set_num_threads(2)
    whole = attend(native, q, cache, context, [(0, 0, length)])
    for first in torch.randint(0, length - 5, (40,)).tolist():
        for count in (1, 5):
            alone = attend(native, q[first : first + count], cache, context, [(0, first, count)])
            assert torch.equal(alone, whole[first : first + count]), (first, count)


def test_what_lies_behind_a_token_does_not_change_it(native: KernelSet) -> None:
    """A rejected draft, even one that is NaN, leaves no trace in the tokens before it."""
    context = make_context([100], 3, 64, torch.float32)
    q = torch.randn(5, 9, 64)
    clean = attend(native, q, fill_cache(native, context), context, [(0, 95, 5)])
    context.k[0][98:] = torch.nan
    context.v[0][98:] = torch.nan
    dirty = attend(native, q, fill_cache(native, context), context, [(0, 95, 5)])
    assert torch.equal(dirty[:3], clean[:3])
    assert dirty[3:].isnan().all()


def test_what_lies_before_a_window_does_not_change_it(native: KernelSet) -> None:
    """Its pages may be gone: they name the null block, which holds anything."""
    context = make_context([100], 3, 64, torch.float32)
    q = torch.randn(5, 9, 64)
    clean = attend(native, q, fill_cache(native, context), context, [(0, 95, 5)], window=30)
    cache = fill_cache(native, context)
    context.block_tables[0, : (96 - 30) // context.block_size] = 0  # whole pages
    assert cache.k[0].isnan().all()
    gone = attend(native, q, cache, context, [(0, 95, 5)], window=30)
    assert torch.equal(gone, clean)


def test_a_slice_of_a_projection(native: KernelSet) -> None:
    context = make_context([50], 2, 16, torch.float32)
    cache = fill_cache(native, context)
    qkv = torch.randn(3, 8, 16)
    sliced, packed = qkv[:, :4], qkv[:, :4].contiguous()
    assert torch.equal(
        attend(native, sliced, cache, context, [(0, 47, 3)]),
        attend(native, packed, cache, context, [(0, 47, 3)]),
    )
