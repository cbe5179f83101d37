from __future__ import annotations

import pytest
import torch
from support.kernels.cases import BLOCK_SIZE, DTYPES
from surestep_kernels import KernelSet
from surestep_kernels.store_kv import LayerCache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["native", "reference"])
def test_writes_the_named_slots_only(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    kernels: KernelSet = request.getfixturevalue(name)
    shape = kernels.kv_cache_shape(4, BLOCK_SIZE, 2, 24)
    k_cache, v_cache = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, 1.0).to(dtype)
    k, v = torch.randn(3, 2, 24).to(dtype), torch.randn(3, 2, 24).to(dtype)
    kernels.store_kv(k, v, LayerCache(k_cache, v_cache), torch.tensor([17, 63, 16]))
    assert k_cache.isnan().sum() == k_cache.numel() - k.numel()
    assert torch.equal(k_cache[~k_cache.isnan()].sort().values, k.flatten().sort().values)
    assert k_cache[[0, 2]].isnan().all()
    assert torch.equal(v_cache[3, :, 15], v[1])
    assert (v_cache[[0, 2]] == 1).all()


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
