"""Pages of the models' types and of FP8. What INT8 does is in test_int8_cache.py."""

from __future__ import annotations

import pytest
import torch
from support.kernels.cases import BLOCK_SIZE, DTYPES
from surestep_kernels import KernelSet
from surestep_kernels.store_kv import FP8, LayerCache
from torch import Tensor

HEADS, HEAD_DIM = 3, 24
SLOTS = [79, 0, 16, 33, 32]


def pages(cache: LayerCache, kernels: KernelSet) -> tuple[Tensor, Tensor]:
    """In the order of positions: C has the keys of a block side by side, dimension by dimension."""
    k, v = cache.pages
    if kernels.name == "C":
        blocks, heads, positions, dims = k.shape
        k = k.view(blocks, heads, dims, positions).transpose(2, 3)
    return k, v


def bits(x: Tensor) -> Tensor:
    """All, but for the sign of NaN: torch makes negative ones of bfloat16, a GPU's division none."""
    return x.contiguous().float().nan_to_num(999.0).view(torch.uint8)


def stored(
    kernels: KernelSet,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    scales: Tensor | None,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    shape = kernels.kv_cache_shape(-(-int(slots.max() + 1) // BLOCK_SIZE), BLOCK_SIZE, *k.shape[1:])
    k_pages, v_pages = (torch.full(shape, torch.nan).to(dtype) for _ in "kv")
    cache = LayerCache(k_pages, v_pages, scales)
    kernels.store_kv(k, v, cache, slots)
    return pages(cache, kernels)


def assert_alike(
    column: KernelSet,
    reference: KernelSet,
    k: Tensor,
    v: Tensor,
    dtype: torch.dtype,
    scales: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Every byte of the pages is that of the reference."""
    slots = torch.tensor(SLOTS) if slots is None else slots
    made, expected = (
        stored(kernels, k, v, dtype, scales, slots) for kernels in (column, reference)
    )
    assert torch.equal(bits(made[0]), bits(expected[0]))
    assert torch.equal(bits(made[1]), bits(expected[1]))
    assert not torch.equal(bits(made[0]), bits(made[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_a_projection(
    column: KernelSet, reference: KernelSet, dtype: torch.dtype
) -> None:
    qkv = torch.randn(len(SLOTS), 4 * HEADS, HEAD_DIM).to(dtype)
    k, v = torch.split(qkv[:, -2 * HEADS :], HEADS, dim=1)
    assert_alike(column, reference, k, v, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_the_named_slots_only(kernels: KernelSet, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 3, 2, 24).to(dtype)
    made = stored(kernels, k, v, dtype, None, torch.tensor([17, 63, 16]))
    for page, x in zip(made, (k, v), strict=True):
        assert page.isnan().sum() == page.numel() - x.numel()
        assert page[[0, 2]].isnan().all()
        assert torch.equal(page[[1, 3, 1], :, [1, 15, 0]], x)


def many_numbers() -> Tensor:
    """Of every exponent, both signs, halves between codes, no number, and beyond the largest."""
    bits = torch.arange(0, 1 << 32, (1 << 16) + 1).to(torch.uint32).view(torch.float32)
    halves = torch.arange(0, 1 << 32, 1 << 19).to(torch.uint32).view(torch.float32)
    return torch.cat((bits, halves, halves.nextafter(torch.tensor(0.0))))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, as interpreter
@pytest.mark.parametrize("scales", [None, (0.5, 3.0), (0.013, 3.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_rounded_like_torch(
    column: KernelSet,
    reference: KernelSet,
    dtype: torch.dtype,
    scales: tuple[float, float] | None,
) -> None:
    """Numbers of every size, halfway cases among them, and what saturates or is none."""
    numbers, heads, dims = many_numbers().to(dtype), 8, 128
    k = numbers[: len(numbers) // (heads * dims) * heads * dims].view(-1, heads, dims)
    slots = torch.randperm(2 * len(k))[: len(k)]
    factors = None if scales is None else torch.tensor(scales)
    assert_alike(column, reference, k, k.flip(0), FP8, factors, slots)


def test_fp8_saturates(kernels: KernelSet) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, 500, -1e30, 448, 464.1, 7, 0]]).view(1, 1, 8)
    for page in stored(kernels, x, x, FP8, None, torch.tensor([9])):
        assert page[0, 0, 9].float().tolist() == [448, -448, 448, -448, 448, 448, 7, 0]


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_slots_outside_are_skipped_and_no_tokens_are_fine(column: KernelSet) -> None:
    cache = LayerCache(*(torch.zeros(2, 1, 8, 8) for _ in "kv"))
    x = torch.ones(3, 1, 8)
    column.store_kv(x, x, cache, torch.tensor([-1, 16, 1 << 40]))
    column.store_kv(x[:0], x[:0], cache, torch.tensor([], dtype=torch.int64))
    assert cache.k.count_nonzero() == cache.v.count_nonzero() == 0


@pytest.mark.parametrize("column", ["triton"], indirect=True)
def test_a_cache_in_another_order(column: KernelSet) -> None:
    k, v = torch.randn(2, 2, HEADS, HEAD_DIM)
    k_cache, v_cache = torch.zeros(2, 5, 8, HEADS, HEAD_DIM)
    view = LayerCache(k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    column.store_kv(k, v, view, torch.tensor([7, 9]))
    assert torch.equal(k_cache.flatten(0, 1)[[7, 9]], k)
    assert torch.equal(v_cache.flatten(0, 1)[[7, 9]], v)
    assert k_cache.count_nonzero() == k.numel()


def test_many_tokens_on_several_threads(native: KernelSet) -> None:
    shape = native.kv_cache_shape(70, BLOCK_SIZE, 3, 64)
    slots = torch.randperm(70 * BLOCK_SIZE)[:1000]
    k, v = torch.randn(1000, 3, 64), torch.randn(1000, 3, 64)
    caches = [torch.zeros(shape) for _ in range(4)]
    for threads, pair in ((1, caches[:2]), (2, caches[2:])):
        native.set_num_threads(threads)
        native.store_kv(k, v, LayerCache(*pair), slots)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
    assert caches[0].sum() != 0
