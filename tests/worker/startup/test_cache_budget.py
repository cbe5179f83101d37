from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_kernels.fingerprint import row_fingerprints
from surestep_kernels.store_kv import FP8, INT8
from surestep_worker.cache.kv_cache import (
    CACHE_DTYPES,
    KVCache,
    KVSpec,
    blocks_that_fit,
    bytes_per_block,
)
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host.host_memory import GIB, FreeMemory, OutOfMemory
from surestep_worker.startup.cache_budget import CacheBudget
from surestep_worker.startup.gpu_memory import PAGE

SPEC = KVSpec(windows=(0,) * 3, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16)
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
    narrow, hidden = replace(SPEC, cache_dtype=FP8), replace(SPEC, kept_hidden=32)
    assert 2 * bytes_per_block(narrow, KERNELS) == bytes_per_block(SPEC, KERNELS)
    both = replace(narrow, kept_hidden=32)
    kept = bytes_per_block(hidden, KERNELS) - bytes_per_block(SPEC, KERNELS)
    assert bytes_per_block(both, KERNELS) - bytes_per_block(narrow, KERNELS) == kept > 0
    kv = KVCache(both, 4, KERNELS, "cpu")
    assert all(tensor.dtype is FP8 for cache in kv.layers for tensor in cache.pages)
    assert kv.hidden.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"device": "cpu"}, 512),
        ({"device": "cpu", "max_num_seqs": 300}, 1200),
        ({"device": "cpu", "max_num_batched_tokens": 2048}, 2048),
        ({"device": "cpu", "max_num_batched_tokens": 64}, 64),
        ({"device": "cuda"}, 2048),
    ],
)
def test_steps_are_shorter_on_cpus_unless_told_otherwise(
    given: dict[str, Any], tokens: int
) -> None:
    assert WorkerSettings(model=Path("m"), **given).max_step_tokens == tokens


def test_int8_pages_hold_a_scale_for_each_position_and_head() -> None:
    narrow = replace(SPEC, cache_dtype=INT8)
    values = 3 * 2 * 2 * 16  # layers, keys and values, heads, positions
    assert bytes_per_block(narrow, KERNELS) == values * (16 + 4)
    kv = KVCache(narrow, 4, KERNELS, "cpu")
    assert sum(tensor.nbytes for cache in kv.layers for tensor in cache.pages) == 4 * values * 20
    assert all(cache.head_dim == 16 for cache in kv.layers)


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_int8_goes_by_two_names(name: str) -> None:
    settings = WorkerSettings.model_validate({"kv_cache_dtype": name})
    assert CACHE_DTYPES[settings.kv_cache_dtype] is INT8


def test_a_budget_without_a_usable_block_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="hold 1 blocks"):
        blocks_that_fit(2 * bytes_per_block(SPEC, KERNELS) - 1, SPEC, KERNELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_sees_one_bit(dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = hidden.clone().view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[3, 2] ^= 1
    fingerprints = row_fingerprints(hidden)
    assert torch.equal(row_fingerprints(hidden.clone()), fingerprints)
    changed = (row_fingerprints(bits.view(dtype)) - fingerprints).tolist()
    assert [abs(change) for change in changed] == [0, 0, 0, 1, 0]


def test_fingerprint_of_a_view() -> None:
    hidden = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    part = hidden[:, 1:4]
    assert torch.equal(row_fingerprints(part), row_fingerprints(part.contiguous()))


def settings(**given: Any) -> WorkerSettings:
    return WorkerSettings.model_validate({"max_num_seqs": 4, "block_size": 16, **given})


def num_blocks(monkeypatch: pytest.MonkeyPatch, left: int, **given: Any) -> int:
    """With so many bytes left; sequences of 160 tokens, so that 41 blocks are of use."""
    monkeypatch.setattr(
        "surestep_worker.startup.cache_budget.free_memory", lambda: FreeMemory(left, "the test")
    )
    return CacheBudget(settings(**given), TensorParallel())._num_blocks(SPEC, KERNELS, 160)


def measured(left: int, max_model_len: int = 160, **given: Any) -> int:
    """Blocks, where so many bytes of a GPU are for caches alone."""
    budget = CacheBudget(settings(device="cuda", **given), TensorParallel(), left)
    return budget._num_blocks(SPEC, KERNELS, max_model_len)


EACH = bytes_per_block(SPEC, KERNELS)


def test_a_cache_that_fits_is_as_large_as_it_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(monkeypatch, left=8 * GIB) == 41
    assert num_blocks(monkeypatch, left=41 * EACH, kv_cache_memory=1.0) == 41


def test_a_default_size_shrinks_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert num_blocks(monkeypatch, left=20 * EACH) == 12
    (message,) = caplog.messages
    assert message.startswith("kv_cache_memory is lowered from 0.00 to 0.00 GiB: 0.00 GiB are left")
    caplog.clear()
    assert num_blocks(monkeypatch, left=20 * EACH, tensor_parallel_size=2) == 6


def test_a_size_that_was_asked_for_is_refused_if_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OutOfMemory, match=r"--kv-cache-memory: 0\.00 GiB, but only"):
        num_blocks(monkeypatch, left=40 * EACH, kv_cache_memory=1.0)


def test_no_room_at_all_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="hold 0 blocks"):
        num_blocks(monkeypatch, left=EACH)


ROUNDING = (2 * len(SPEC.layers) + 1) * PAGE


def test_what_is_measured_goes_to_blocks_whatever_the_slots_could_use() -> None:
    assert measured(1000 * EACH + ROUNDING) == 1000
    assert measured(1000 * EACH + ROUNDING - 1) == 999


def test_a_size_that_is_given_wins_over_what_is_measured() -> None:
    gib = 50 * EACH / GIB
    assert measured(1000 * EACH, kv_cache_memory=gib) == 41
    assert measured(1000 * EACH, num_gpu_blocks_override=50) == 50
    with pytest.raises(OutOfMemory, match=r"--kv-cache-memory: 0\.00 GiB, but only"):
        measured(40 * EACH, kv_cache_memory=gib)
    with pytest.raises(OutOfMemory, match=r"--num-gpu-blocks-override: 0\.00 GiB, but only"):
        measured(40 * EACH, num_gpu_blocks_override=50)


def test_blocks_are_overridden_on_cpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_blocks(monkeypatch, left=8 * GIB, num_gpu_blocks_override=7) == 7


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused_with_one_that_does() -> None:
    left = 5 * EACH + ROUNDING  # the NULL block and 4 of 16 tokens
    assert measured(left, max_model_len=65) == 5
    with pytest.raises(OutOfMemory) as caught:
        CacheBudget(settings(device="cuda", max_model_len=66), TensorParallel(), left)._num_blocks(
            SPEC, KERNELS, 66
        )
    assert "--max-model-len 66: a request of 66 tokens takes 0.00 GiB" in str(caught.value)
    assert "--max-model-len 65 would do" in str(caught.value)
    assert "--gpu-memory-utilization (now 0.9)" in str(caught.value)


def test_a_models_own_length_that_does_not_fit_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert measured(5 * EACH + ROUNDING, max_model_len=131072) == 5
    assert "a request of 131072 tokens takes" in caplog.text
    assert "65 tokens fit" in caplog.text


def test_windows_let_longer_requests_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers in two groups: blocks are half as large, and a request needs few of one kind."""
    spec = replace(SPEC, windows=(0, 20, 0, 20))
    assert 3 * bytes_per_block(spec, KERNELS) == 2 * EACH
    left = 14 * bytes_per_block(spec, KERNELS) + (2 * 2 + 1) * PAGE
    budget = CacheBudget(settings(device="cuda", max_model_len=161), TensorParallel(), left)
    assert budget._num_blocks(spec, KERNELS, 161) == 14  # 10 of one group, 3 of the other, NULL
    longer = CacheBudget(settings(device="cuda", max_model_len=162), TensorParallel(), left)
    with pytest.raises(OutOfMemory, match="161 tokens fit; --max-model-len 161 would do"):
        longer._num_blocks(spec, KERNELS, 162)
    monkeypatch.setattr(
        "surestep_worker.startup.cache_budget.free_memory", lambda: FreeMemory(GIB, "the test")
    )
    budget = CacheBudget(settings(), TensorParallel())
    assert budget._num_blocks(spec, KERNELS, 160) == 1 + 4 * 10 * 2


def test_a_part_of_a_gpu_does_nothing_on_cpus(caplog: pytest.LogCaptureFixture) -> None:
    CacheBudget(settings(), TensorParallel())
    assert not caplog.text
    CacheBudget(settings(gpu_memory_utilization=0.9), TensorParallel())
    assert "--gpu-memory-utilization does nothing on CPUs" in caplog.text
