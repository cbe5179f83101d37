from __future__ import annotations

import pytest
import torch
from support.kernels.cases import DTYPES
from surestep_kernels.store_kv import FP8, LayerCache, store_kv_reference
from surestep_kernels.store_kv.triton import store_kv
from torch import Tensor

HEADS, HEAD_DIM, BLOCKS, BLOCK_SIZE = 3, 24, 5, 8
SLOTS = [39, 0, 8, 17, 16]


def bits(x: Tensor) -> Tensor:
    """All, but for the sign of NaN: torch makes negative ones of bfloat16, a GPU's division none."""
    return x.cpu().float().nan_to_num(999.0).view(torch.uint8)


def stored(gpu: str, k: Tensor, v: Tensor, dtype: torch.dtype, scales: Tensor | None) -> None:
    """Write with kernel and reference and compare every byte of the caches."""
    shape = (BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
    k_cache, v_cache = (torch.full(shape, torch.nan).to(dtype) for _ in "kv")
    on_gpu = None if scales is None else scales.to(gpu)
    actual = LayerCache(k_cache.clone().to(gpu), v_cache.clone().to(gpu), on_gpu)
    expected = LayerCache(k_cache, v_cache, scales)
    slots = torch.tensor(SLOTS)
    store_kv_reference(k, v, expected, slots)
    store_kv(k.to(gpu), v.to(gpu), actual, slots.to(gpu))
    assert torch.equal(bits(actual.k), bits(expected.k))
    assert torch.equal(bits(actual.v), bits(expected.v))
    assert not torch.equal(bits(actual.k), bits(actual.v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_a_projection(gpu: str, dtype: torch.dtype) -> None:
    qkv = torch.randn(len(SLOTS), 4 * HEADS, HEAD_DIM).to(dtype)
    k, v = torch.split(qkv[:, -2 * HEADS :], HEADS, dim=1)
    stored(gpu, k, v, dtype, None)


@pytest.mark.parametrize("scales", [None, (0.013, 3.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_rounded_like_torch(
    gpu: str, dtype: torch.dtype, scales: tuple[float, float] | None
) -> None:
    """Numbers of every size, halfway cases among them, and what saturates or is none."""
    shape = (len(SLOTS), HEADS, HEAD_DIM)
    k, v = ((torch.randn(shape) * 4.0 ** torch.randint(-6, 6, shape)).to(dtype) for _ in "kv")
    halfway = torch.arange(-254.0, 0).view(-1, 1).exp2()[-24:].flatten()  # subnormals too
    k[0, 0] = halfway.to(dtype) * 1.0625
    odd = torch.tensor([448, 449, 464, 465, 1e9, torch.inf, torch.nan, 0, 3 * 2.0**-10, 2.0**-10])
    k[1, 0, :20] = torch.cat((odd, -odd.where(odd == odd, 0))).to(dtype)
    stored(gpu, k, v, FP8, None if scales is None else torch.tensor(scales))


def test_fp8_saturates(gpu: str) -> None:
    cache = LayerCache(*(torch.zeros(2, 1, 8, 8, device=gpu).to(FP8) for _ in "kv"))
    x = torch.tensor([[torch.inf, -torch.inf, 500, -1e30, 448, 464.1, 7, 0]]).view(1, 1, 8).to(gpu)
    store_kv(x, x, cache, torch.tensor([9], device=gpu))
    assert cache.k[1, 0, 1].float().tolist() == [448, -448, 448, -448, 448, 448, 7, 0]


def test_slots_outside_are_skipped_and_no_tokens_are_fine(gpu: str) -> None:
    cache = LayerCache(*(torch.zeros(2, 1, 8, 8, device=gpu) for _ in "kv"))
    x = torch.ones(3, 1, 8, device=gpu)
    store_kv(x, x, cache, torch.tensor([-1, 16, 1 << 40], device=gpu))
    store_kv(x[:0], x[:0], cache, torch.tensor([], dtype=torch.int64, device=gpu))
    assert cache.k.count_nonzero() == cache.v.count_nonzero() == 0


def test_a_cache_in_another_order(gpu: str) -> None:
    k, v = torch.randn(2, HEADS, HEAD_DIM), torch.randn(2, HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, device=gpu) for _ in "kv")
    view = LayerCache(k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    store_kv(k.to(gpu), v.to(gpu), view, torch.tensor([7, 9], device=gpu))
    assert torch.equal(k_cache.cpu().flatten(0, 1)[[7, 9]], k)
    assert torch.equal(v_cache.cpu().flatten(0, 1)[[7, 9]], v)
    assert k_cache.count_nonzero() == k.numel()
