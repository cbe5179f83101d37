"""Memory of caches is free until it is used."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from surestep_worker.cache.kv_cache import zero_pages
from torch import Tensor

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def make_caches() -> list[Tensor]:
    """As a rank does, in a thread, when C's allocator has learnt to keep blocks of 32 MB."""
    np.ones(31 * MB, dtype=np.uint8)
    return [zero_pages((31, MB // 4), torch.float32, "cpu") for _ in range(16)]


def test_untouched_pages_take_no_memory_in_any_thread() -> None:
    before = resident()
    with ThreadPoolExecutor(1) as thread:
        caches = thread.submit(make_caches).result()
    assert resident() - before < 100 * MB
    for each in caches:
        each[-1] += 1
        assert (int(each[0].sum()), int(each[-1].sum())) == (0, MB // 4)


def test_nothing_is_no_memory() -> None:
    assert zero_pages((4, 0), torch.bfloat16, "cpu").shape == (4, 0)
