"""Memory per request of a hybrid is one state and K + 1 records, and that is what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.hybrid import make_tiny_hybrid
from support.parity.bench import Neighbours, build_runner, load
from surestep_worker.cache.recurrent import RecurrentCache, RecurrentSpec
from surestep_worker.distributed.tensor_parallel import TensorParallel

MIB = 1 << 20
# Linear layers, value heads, and the MiB per state and per record of published models:
# qwen3-next-80b-a3b, and the 27b and 35b-a3b classes of Qwen3.5.
PUBLISHED = [(36, 32, 72.0, 1.13), (48, 48, 144.0, 2.18), (30, 32, 60.0, 0.94)]


def spec_of(num_layers: int, v_heads: int) -> RecurrentSpec:
    return RecurrentSpec(
        num_layers=num_layers,
        num_k_heads=16,
        num_v_heads=v_heads,
        k_dim=128,
        v_dim=128,
        taps=4,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(("layers", "v_heads", "state_mib", "record_mib"), PUBLISHED)
def test_sizes_of_published_models(
    layers: int, v_heads: int, state_mib: float, record_mib: float
) -> None:
    spec = spec_of(layers, v_heads)
    conv = layers * 3 * spec.channels * 2 / MIB
    assert spec.snapshot_bytes / MIB == pytest.approx(state_mib + conv)
    # A record: the keys once per key head, deltas, decays, and the convolution's inputs.
    assert spec.record_bytes / MIB == pytest.approx(record_mib, rel=0.35)
    with_k_copies = 4 * spec.snapshot_bytes
    assert spec.slot_bytes(window=4) < 0.32 * with_k_copies


@pytest.mark.parametrize("window", [1, 2, 6])
def test_what_is_allocated_is_what_is_said(window: int) -> None:
    spec = spec_of(3, 32)
    cache = RecurrentCache(spec, num_slots=2, window=window, num_snapshots=1, device="cpu")
    assert cache.slot_bytes == spec.slot_bytes(window)
    assert all(len(tensor) == 2 + 1 for tensor in cache.tensors())  # the NULL slot too


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_worker_reports_it(tmp_path: Path, k: int) -> None:
    tp = TensorParallel()
    model = load(make_tiny_hybrid(tmp_path), tp)
    built = build_runner(model, tp, Neighbours(num_slots=3), "mtp", k)
    spec = model.recurrent_spec()
    assert spec is not None
    assert built.facts.recurrent
    assert built.facts.state_bytes_per_slot == spec.slot_bytes(k + 1)
    assert built.facts.drafter_has_state == (k > 0)
