"""The INT8 cache, with a scale for each position and head: what is written, and what attention reads
of it."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import (
    BLOCK_SIZE,
    COUNTS,
    DTYPES,
    LENGTHS,
    Context,
    assert_close,
    attend,
    attends_alike_alone,
    batch_of,
    fill_cache,
    make_context,
    row_bounds,
    slots_of,
)
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import FP8, INT8, LayerCache, decode_int8, with_scales
from torch import Tensor

SCALE = torch.float32.itemsize


def new_cache(
    kernels: KernelSet, blocks: int, heads: int, dims: int, size: int = BLOCK_SIZE
) -> LayerCache:
    """Pages of -1 in every byte: codes of -1, and scales that are NaN."""
    shape = with_scales(kernels.kv_cache_shape(blocks, size, heads, dims), INT8)
    return LayerCache(*(torch.full(shape, -1, dtype=INT8) for _ in "kv"))


def fill(kernels: KernelSet, context: Context) -> LayerCache:
    heads, dims = context.k[0].shape[1:]
    blocks = int(context.block_tables.max()) + 2
    cache = new_cache(kernels, blocks, heads, dims, context.block_size)
    for row, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
        kernels.store_kv(k, v, cache, slots_of(context, row))
    return cache


def as_reference(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Pages of the C kernels in the order of the reference: a head has all codes, then all scales."""
    heads = [pages.flatten(2) for pages in cache.pages]
    dims, (blocks, kv_heads) = cache.head_dim, cache.k.shape[:2]
    codes = [head[..., : dims * BLOCK_SIZE] for head in heads]
    k = codes[0].view(blocks, kv_heads, dims, BLOCK_SIZE).transpose(2, 3)
    v = codes[1].view(blocks, kv_heads, BLOCK_SIZE, dims)
    scales = [
        head[..., dims * BLOCK_SIZE :].view(blocks, kv_heads, BLOCK_SIZE, SCALE) for head in heads
    ]
    return torch.cat((k, scales[0]), -1), torch.cat((v, scales[1]), -1)


def rows_of_every_size(dims: int) -> Tensor:
    """Magnitudes from the least subnormal on, zeros, halves between codes, and what is not finite,
    in one element or in all."""
    powers = torch.ldexp(torch.randn(276, dims), torch.arange(-149, 127)[:, None])
    least = torch.arange(256)[:, None] * torch.linspace(-1, 1, dims) * 2.0**-149
    halves = torch.arange(dims) * 0.5
    halves[-1] = 127.0
    special = torch.zeros(7, dims)
    special[1, 3], special[2, 0], special[3, -1] = torch.inf, torch.nan, -torch.inf
    special[4], special[5], special[6] = -torch.inf, torch.nan, -0.0
    return torch.cat((powers, least, halves[None], -halves[None], special))


@pytest.mark.parametrize("dims", [8, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_the_codes_and_scales_of_the_reference(
    native: KernelSet, reference: KernelSet, dtype: torch.dtype, dims: int
) -> None:
    k = rows_of_every_size(dims).to(dtype)
    k = k[: len(k) // 2 * 2].view(-1, 2, dims)
    v = k.flip(0).contiguous()
    blocks = -(-len(k) // BLOCK_SIZE) + 1
    slots = torch.randperm(blocks * BLOCK_SIZE)[: len(k)]
    made, expected = (new_cache(kernels, blocks, 2, dims) for kernels in (native, reference))
    native.store_kv(k, v, made, slots)
    reference.store_kv(k, v, expected, slots)
    for ours, theirs in zip(as_reference(made), expected.pages, strict=True):
        assert torch.equal(ours[..., :-SCALE], theirs[..., :-SCALE])
        scales = [pages[..., -SCALE:].contiguous().view(torch.float32) for pages in (ours, theirs)]
        assert torch.equal(scales[0].isnan(), scales[1].isnan())
        assert torch.equal(scales[0].nan_to_num(), scales[1].nan_to_num())
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    kept = decode_int8(expected.k[block, :, offset])
    largest = k.float().abs().amax(-1, keepdim=True)
    assert torch.equal(kept.isnan().all(-1), ~largest.isfinite()[..., 0])
    assert torch.equal(kept.isnan().any(-1), kept.isnan().all(-1))
    there = largest.isfinite()
    error = (kept - k.float()).abs().amax(-1, keepdim=True)
    assert (error <= largest / 250 + 2.0**-143)[there].all()


def test_one_position_gives_its_value(native: KernelSet, reference: KernelSet) -> None:
    """Every code, wherever it lies, and no finite number for what was none."""
    values = torch.arange(-127, 129).clamp(max=127).view(32, 1, 8).float()
    values[:, :, 7] = 127.0
    values[5] = 0.0
    values[9, 0, 2], values[20, 0, 0] = torch.inf, torch.nan
    for kernels in (native, reference):
        cache = new_cache(kernels, 3, 1, 8)
        kernels.store_kv(torch.zeros_like(values), values, cache, torch.arange(32))
        tables = torch.tensor([[0], [1]], dtype=torch.int32)
        for place, value in enumerate(values):
            at = torch.tensor([place // BLOCK_SIZE])
            start = torch.tensor([place % BLOCK_SIZE], dtype=torch.int32)
            rows = AttentionRows(tables, at, row_bounds([1]), start, 1)
            out = kernels.paged_attention(torch.zeros(1, 1, 8), cache, rows, 1.0, window=1)
            if place in (9, 20):
                assert out.isnan().all()
            else:
                assert torch.equal(out[0], value)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("count", [1, 40])
def test_a_key_or_value_that_is_no_number_is_seen(
    native: KernelSet, reference: KernelSet, which: str, count: int
) -> None:
    context = make_context([70], 1, 16, torch.float32)
    getattr(context, which)[0][50, 0, 3] = torch.nan
    start = torch.tensor([70 - count], dtype=torch.int32)
    rows = AttentionRows(context.block_tables, torch.tensor([0]), row_bounds([count]), start, count)
    q = torch.randn(count, 1, 16)
    sees = torch.arange(70 - count, 70) >= 50
    for kernels in (native, reference):
        out = kernels.paged_attention(q, fill(kernels, context), rows, 0.25)
        assert out[sees].isnan().all()
        if kernels is native:
            assert out[~sees].isfinite().all()


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 2, 24, 8), (8, 1, 40, 48)]
)
def test_attends_as_the_reference_and_alike_in_any_window(
    native: KernelSet,
    reference: KernelSet,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    sinks: bool,
    window: int,
) -> None:
    context = make_context(LENGTHS, kv_heads, head_dim, dtype, block_size)
    q = torch.randn(sum(COUNTS), heads, head_dim).to(dtype)
    more = {"sinks": torch.randn(heads), "softcap": 1.5} if sinks else {}
    options: dict[str, object] = {"window": window, **more}
    cache, batch = fill(native, context), batch_of(context)
    made = attend(native, q, cache, batch, **options)
    assert attends_alike_alone(native, q, cache, context, made, **options)
    expected = attend(reference, q, fill(reference, context), batch, **options)
    # The weights of the codes of values, scales included, may be rounded to bfloat16.
    assert_close(made, expected, ratio=1.5e-2 if dtype is torch.bfloat16 else None)


def test_what_is_stored_does_not_depend_on_what_is_stored_with_it(native: KernelSet) -> None:
    context = make_context([70], 2, 24, torch.bfloat16)
    together, slots = fill(native, context), slots_of(context, 0)
    apart = LayerCache(*(torch.full_like(pages, -1) for pages in together.pages))
    for first, last in ((0, 1), (1, 3), (3, 40), (40, 70)):
        k, v = context.k[0][first:last], context.v[0][first:last]
        native.store_kv(k, v, apart, slots[first:last])
    assert all(torch.equal(*pages) for pages in zip(together.pages, apart.pages, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_is_as_close_to_an_exact_cache_as_its_steps_are_small(
    native: KernelSet, reference: KernelSet, head_dim: int
) -> None:
    """An element is off by half a step at most, 1/254 of the largest of its head. What is attended
    is an average of such values, by weights from scores that err in as small a way."""
    context = make_context(LENGTHS, 2, head_dim, torch.bfloat16)
    q, wide = torch.randn(sum(COUNTS), 4, head_dim), torch.float32
    exact = Context(
        [k.to(wide) for k in context.k], [v.to(wide) for v in context.v], context.block_tables
    )
    batch = batch_of(context)
    wanted = attend(reference, q, fill_cache(reference, exact), batch)
    errors = [
        attend(native, q, cache, batch) - wanted
        for cache in (fill(native, exact), fill_cache(native, exact, FP8))
    ]
    largest = max(float(v.abs().max()) for v in exact.v)
    assert errors[0].abs().max() <= largest / 127
    assert errors[0].norm() <= 0.01 * wanted.norm()
    assert errors[0].norm() <= 0.3 * errors[1].norm()
