"""What a rank measures of its GPU is what it then takes: counted on tensors of the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity.bench import load, make_hybrid, make_model
from surestep_kernels import load_kernels
from surestep_kernels.table import STEP_REFERENCE
from surestep_proto import worker_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host.host_memory import OutOfMemory
from surestep_worker.startup import try_out as trials
from surestep_worker.startup.build import assemble, start
from surestep_worker.startup.built import Built
from surestep_worker.startup.cache_budget import MIN_CACHE_SIZES, CacheBudget, CacheSizes
from surestep_worker.startup.gpu_memory import PAGE, MemorySnapshot
from surestep_worker.startup.gpu_memory_profiler import GpuMemoryProfiler
from surestep_worker.startup.largest_steps import run_largest_steps
from surestep_worker.startup.profile import Check
from surestep_worker.startup.speculation import Speculation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedCard(TorchDispatchMode):
    """Counts storage that is made while it is entered. As torch's allocator on a GPU does, it keeps
    what was freed until somebody has it release that; others hold what `others` says."""

    def __init__(self, total: int, others: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total, self.others = total, others
        self._sizes: dict[int, int] = {}  # of live storage, by address
        self.reserved = 0  # high water since the last release

    @property
    def live(self) -> int:
        """Bytes of tensors that are in use."""
        return sum(self._sizes.values())

    def snapshot(self) -> MemorySnapshot:
        """See GpuMemory."""
        return MemorySnapshot(self._total - self.others - self.reserved, self._total, self.reserved)

    def release(self) -> None:
        """See GpuMemory."""
        gc.collect()
        self.reserved = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every op of torch: what of its results is new."""
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _counts(leaf) and (key := _key(leaf)) not in inputs and key not in self._sizes:
                storage = leaf.untyped_storage()
                self._sizes[key] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, key, None)
        self.reserved = max(self.reserved, self.live)
        return out


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


pytestmark = pytest.mark.rotates(3)

MIB = 1 << 20
MAKE = {"dense": make_model, "hybrid": make_hybrid}
DRAFTER = {"dense": "ngram", "hybrid": "mtp"}


class Bench:
    """A tiny model, and ranks around it that step as on a device."""

    def __init__(self, folder: Path, kind: str) -> None:
        MAKE[kind](folder)
        self.tp, self.drafter = TensorParallel(), DRAFTER[kind]
        self.model = load(folder, self.tp)
        self.kernels = replace(load_kernels("cpu"), step=STEP_REFERENCE)

    def settings(self, **given: Any) -> WorkerSettings:
        sizes = {"max_num_seqs": 6, "max_model_len": 96, "max_num_batched_tokens": 512}
        drafts = {"method": self.drafter, "num_speculative_tokens": 3}
        told = {"device": "cpu", "speculative_config": drafts, **sizes, **given}
        return WorkerSettings.model_validate(told)

    def assemble(self, settings: WorkerSettings, sizes: CacheSizes) -> Built:
        return assemble(settings, self.model, self.tp, self.kernels, sizes=sizes)

    def sizes(self, settings: WorkerSettings, left: int) -> CacheSizes:
        length, drafts = settings.max_model_len or 0, 3
        budget = CacheBudget(settings, self.tp, left)
        return budget.sizes(self.model, self.kernels, length, drafts)

    def measure(self, profiler: GpuMemoryProfiler, settings: WorkerSettings) -> int:
        return profiler.measure(lambda: self.assemble(settings, MIN_CACHE_SIZES).runner, self.tp)


@pytest.fixture(params=MAKE)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Caches are torch's from the start, as they are on a GPU."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    for module in ("cache.kv_cache", "cache.recurrent"):
        monkeypatch.setattr(f"surestep_worker.{module}.zero_pages", zeros)
    return Bench(tmp_path, request.param)


def test_a_rank_that_serves_the_largest_steps_stays_within_its_part(bench: Bench) -> None:
    """Beside others; and next to nothing of its part is left over."""
    settings = bench.settings(gpu_memory_utilization=0.5)
    with CountedCard(total=200 * MIB, others=60 * MIB) as card:
        profiler = GpuMemoryProfiler(card, settings)
        before = card.live
        left = bench.measure(profiler, settings)
        assert card.live == before, "what was assembled to measure is still there"
        sizes = bench.sizes(settings, left)
        built = bench.assemble(settings, sizes)
        built.runner.prepare()
        run_largest_steps(built.runner)
        kv, recurrent = built.runner.context.caches.kv, built.runner.context.caches.recurrent
        snapshots = recurrent.num_snapshots * recurrent.spec.snapshot_bytes if recurrent else 0
        memory = profiler.report(built.facts.kv_cache_bytes + snapshots)
        tensors = 2 * len(kv.spec.layers) + 1 + (2 * recurrent.spec.num_layers if recurrent else 0)
        limit, rounding = memory.limit, tensors * PAGE
        assert limit == 100 * MIB
        assert card.reserved <= limit
        parts = memory.weights + memory.states + memory.graphs + memory.step + memory.caches
        assert parts <= limit - rounding < parts + 16 * 1024 + MIB
        assert card.reserved > limit - rounding - memory.graphs - 2 * MIB
        assert memory.step > MIB // 4
        assert (sizes.num_snapshots > 0) == (recurrent is not None)


def test_logits_of_prompts_are_held_some_rows_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the largest step, whose 512 tokens are scored, they would take most of its memory."""
    built, rows = bench.assemble(bench.settings(), MIN_CACHE_SIZES), list[int]()
    model = type(bench.model)
    logits = model.logits

    def counted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(model, "logits", counted)
    run_largest_steps(built.runner)
    assert max(rows) == 256
    assert sum(rows) > 512


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage stays until somebody asks for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_rank_that_is_tried_again_finds_the_memory_of_the_first_trial(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft head has failed, and caches are as large as the card allows."""
    settings = bench.settings()
    monkeypatch.setattr(trials, "check_drafter", lambda runner: Check(4, 0, 0))
    monkeypatch.setattr(trials, "output_is_finite", lambda runner: True)
    caches, live = list[weakref.ref[torch.Tensor]](), list[int]()
    with CountedCard(total=200 * MIB) as card:
        profiler = GpuMemoryProfiler(card, settings)

        def build(sizes: CacheSizes) -> Built:
            assert [cache() for cache in caches] == [None] * len(caches)
            live.append(card.live)
            built = bench.assemble(settings, sizes)
            caches.append(weakref.ref(built.runner.context.caches.kv.layers[0].k))
            return built

        sizes = bench.sizes(settings, bench.measure(profiler, settings))
        source: Any = None  # which is asked for where logits are not finite
        trials.try_out(
            lambda: start(build, sizes, profiler), source, Speculation(), require_drafter=False
        )
    first, *others = live
    assert others == [first] * (bench.drafter == "mtp"), "n-grams are not tried"


def test_where_nothing_is_left_the_error_names_the_numbers(bench: Bench) -> None:
    settings = bench.settings(gpu_memory_utilization=0.5)
    with CountedCard(total=2 * MIB) as card:
        profiler = GpuMemoryProfiler(card, settings)
        with pytest.raises(
            OutOfMemory, match=r"0\.5: nothing of 0\.00 GiB is left for KV"
        ) as caught:
            bench.measure(profiler, settings)
    assert "weights 0.00 GiB, states 0.00 GiB, graphs" in str(caught.value)
    assert "raise it, lower --max-num-batched-tokens" in str(caught.value)


def test_torchs_own_error_becomes_one_that_says_what_to_lower(bench: Bench) -> None:
    settings, card = bench.settings(), CountedCard(total=64 * MIB)

    def assemble_in_vain() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 ...")

    with pytest.raises(OutOfMemory, match=r"no room .*: CUDA out of memory; lower --max-num-b"):
        GpuMemoryProfiler(card, settings).measure(assemble_in_vain, bench.tp)


def test_a_part_that_is_not_free_is_refused_before_anything_is_loaded(bench: Bench) -> None:
    settings = bench.settings(gpu_memory_utilization=0.9)
    with pytest.raises(OutOfMemory, match=r"other processes hold the rest"):
        GpuMemoryProfiler(CountedCard(total=100 * MIB, others=40 * MIB), settings)
    GpuMemoryProfiler(CountedCard(total=100 * MIB, others=40 * MIB), bench.settings())


class Returning(CountedCard):
    """What a dead process held comes back after so many looks."""

    looks = 0

    def snapshot(self) -> Any:
        self.looks += 1
        if self.looks == 3:
            self.others = 0
        return super().snapshot()


def test_a_successor_waits_for_the_memory_of_the_one_before(bench: Bench) -> None:
    """It takes what that had, and refuses nothing meanwhile."""
    settings = bench.settings(gpu_memory_utilization=0.9)
    known = pb.DeviceMemory(total=100 * MIB, limit=90 * MIB, weights=20 * MIB, caches=60 * MIB)
    card = Returning(total=100 * MIB, others=90 * MIB)
    GpuMemoryProfiler(card, settings, known=known)
    assert card.looks == 3


def test_a_successor_does_not_wait_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others have taken it: with what there is the next one measures again."""
    monkeypatch.setattr("surestep_worker.startup.gpu_memory_profiler._RECLAIM_S", 0.2)
    known = pb.DeviceMemory(total=100 * MIB, limit=90 * MIB, weights=80 * MIB)
    settings = bench.settings()
    with CountedCard(total=100 * MIB, others=60 * MIB) as card:
        profiler = GpuMemoryProfiler(card, settings, known=known)
        assert "going on with 0.04 GiB of the GPU, not 0.08 GiB" in caplog.text
        assert 0 < bench.measure(profiler, settings) <= 30 * MIB
