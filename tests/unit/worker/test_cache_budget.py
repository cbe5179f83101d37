from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.kv_cache import FP8
from surestep_worker.digest import fingerprint
from surestep_worker.kv_cache import KVCache, KVSpec, blocks_that_fit, bytes_per_block

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
KERNELS = load_kernels("cpu")


def test_a_cache_of_the_blocks_that_fit_fits() -> None:
    budget = 10 * bytes_per_block(SPEC, KERNELS) - 1
    blocks = blocks_that_fit(budget, SPEC, KERNELS)
    kv = KVCache(SPEC, blocks, KERNELS, "cpu")
    used = sum(tensor.nbytes for cache in kv.layers for tensor in cache.pages)
    assert blocks == 9
    assert used == 9 * bytes_per_block(SPEC, KERNELS) <= budget


def test_layers_share_nothing() -> None:
    kv = KVCache(SPEC, 4, KERNELS, "cpu")
    assert len(kv.layers) == 3
    assert len({tensor.data_ptr() for cache in kv.layers for tensor in cache.pages}) == 6
    assert all(tensor.dtype is torch.bfloat16 for cache in kv.layers for tensor in cache.pages)


def test_fp8_pages_take_half_of_bfloat16_and_leave_hidden_states_alone() -> None:
    narrow, hidden = replace(SPEC, cache_dtype=FP8), replace(SPEC, hidden_size=32)
    assert 2 * bytes_per_block(narrow, KERNELS) == bytes_per_block(SPEC, KERNELS)
    both = replace(narrow, hidden_size=32)
    kept = bytes_per_block(hidden, KERNELS) - bytes_per_block(SPEC, KERNELS)
    assert bytes_per_block(both, KERNELS) - bytes_per_block(narrow, KERNELS) == kept > 0
    kv = KVCache(both, 4, KERNELS, "cpu")
    assert all(tensor.dtype is FP8 for cache in kv.layers for tensor in cache.pages)
    assert kv.hidden.dtype is torch.bfloat16


def test_a_budget_without_a_usable_block_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="hold 1 blocks"):
        blocks_that_fit(2 * bytes_per_block(SPEC, KERNELS) - 1, SPEC, KERNELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_sees_one_bit(dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = hidden.clone().view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[3, 2] ^= 1
    assert fingerprint(hidden) == fingerprint(hidden.clone())
    assert abs(fingerprint(hidden) - fingerprint(bits.view(dtype))) == 1


def test_fingerprint_of_a_view() -> None:
    hidden = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert fingerprint(hidden[:, 1:4]) == fingerprint(hidden[:, 1:4].contiguous())
