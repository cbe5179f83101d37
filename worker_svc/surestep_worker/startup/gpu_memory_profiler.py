"""Measure the GPU memory available for a rank's caches, with everything else in place.

Before a rank allocates anything it takes a snapshot of its GPU. With the model loaded it is
assembled once with minimal caches, compiles and captures what it will serve with, and runs the
largest steps. What then remains of its share of the GPU is for the caches that it is assembled
with.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from surestep_common.errors import InvalidRequest
from surestep_proto import worker_pb2 as pb

from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.host.host_memory import OutOfMemory
from surestep_worker.step.runner import Runner

from .gpu_memory import (
    CudaMemory,
    GpuMemory,
    MemoryShare,
    MemorySnapshot,
    Usage,
    bytes_taken,
    gib,
    left_for_caches,
    memory_limit,
)
from .largest_steps import run_largest_steps

logger = logging.getLogger(__name__)

_RECLAIM_S = 20.0  # for the driver to reclaim the memory of a dead process
_POLL_S = 0.1
_REMEDIES = (
    "lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs or a quantised checkpoint"
)


class GpuMemoryProfiler:
    """Profiles the memory of one rank's GPU. Created before the rank allocates any of it."""

    def __init__(
        self,
        gpu: GpuMemory,
        settings: WorkerSettings,
        sharers: int = 1,
        known: pb.DeviceMemory | None = None,
    ) -> None:
        """`sharers` ranks of the group are on this GPU; `known` is what an earlier rank used.

        Waits for a limited time until that much is free. Raises OutOfMemory if the settings demand
        a share of the GPU that is not free.
        """
        self._gpu, given = gpu, settings.model_fields_set
        sized = not given.isdisjoint(("kv_cache_memory", "num_gpu_blocks_override"))
        fraction = None if sized else settings.gpu_memory_utilization
        self._part = MemoryShare(fraction, "gpu_memory_utilization" in given, sharers)
        self._usage: Usage | None = None
        self._limit: int | None = None
        if known is not None and known.limit:
            self._start = _wait_for(gpu, _all_of(known))
        else:
            self._start = gpu.snapshot()
            self._limit = memory_limit(self._part, self._start)

    def measure(self, assemble: Callable[[], Runner], tp: TensorParallel) -> int:
        """Return the bytes available for caches on every rank of the group. The runner is dropped
        again.

        Raises OutOfMemory if nothing is left for caches.
        """
        if self._limit is None:
            self._limit = memory_limit(self._part, self._start)
        try:
            self._usage = self._measured(assemble)
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            message = f"the weights leave no room for the largest step: {said}; {_REMEDIES}"
            raise OutOfMemory(message) from error
        self.release()
        left = left_for_caches(self._limit, self._usage, self._gpu.snapshot())
        least = int(tp.all_gather(torch.tensor([left])).min())
        if not least:
            raise self._no_room(self._limit, self._usage)
        return least

    def release(self) -> None:
        """Give back what nothing in this process uses any more."""
        self._gpu.release()

    def report(self, caches: int) -> pb.DeviceMemory:
        """Return the use of the memory, and log it. Call it after `measure`."""
        usage, limit = self._usage, self._limit
        assert usage is not None
        assert limit is not None
        context = dict(zip(Usage._fields, usage, strict=True)) | {"caches": caches}
        sizes = ", ".join(f"{name} {gib(size)}" for name, size in context.items())
        spare = gib(limit - usage.total - caches)
        total = self._start.total
        logger.info(
            "memory of the GPU: %s of %s: %s, spare %s", gib(limit), gib(total), sizes, spare
        )
        return pb.DeviceMemory(total=total, limit=limit, **context)

    def _measured(self, assemble: Callable[[], Runner]) -> Usage:
        gpu = self._gpu
        gpu.release()
        loaded = gpu.snapshot()
        runner = assemble()
        assembled = gpu.snapshot()
        runner.prepare()
        gpu.release()  # keeps only graphs, and what is loaded with kernels
        prepared = gpu.snapshot()
        run_largest_steps(runner)
        return Usage(
            weights=bytes_taken(self._start, loaded),
            states=bytes_taken(loaded, assembled),
            graphs=max(0, bytes_taken(assembled, prepared), runner.graph_bytes),
            step=bytes_taken(prepared, gpu.snapshot()),
        )

    def _no_room(self, limit: int, usage: Usage) -> OutOfMemory:
        part, taken_by = self._part, zip(Usage._fields, usage, strict=True)
        sizes = ", ".join(f"{name} {gib(size)}" for name, size in taken_by)
        if part.fraction is None:
            of, remedy = "what is free on the GPU", "end what else runs there"
        else:
            of = f"--gpu-memory-utilization {part.fraction:g}"
            remedy = "raise it" if limit < self._start.free else "end what else runs there"
        return OutOfMemory(
            f"{of}: nothing of {gib(limit)} is left for KV blocks: {sizes}; {remedy}, {_REMEDIES}",
            param="gpu_memory_utilization",
        )


def _all_of(known: pb.DeviceMemory) -> int:
    return known.weights + known.states + known.graphs + known.step + known.caches


def _wait_for(gpu: GpuMemory, needed: int) -> MemorySnapshot:
    """Return the first snapshot with `needed` free bytes, or the last one before the timeout."""
    until, snapshot = time.monotonic() + _RECLAIM_S, gpu.snapshot()
    if snapshot.free < needed:
        logger.info("waiting for %s of the GPU: %s are free", gib(needed), gib(snapshot.free))
    while snapshot.free < needed and time.monotonic() < until:
        time.sleep(_POLL_S)
        snapshot = gpu.snapshot()
    if snapshot.free < needed:
        logger.warning("going on with %s of the GPU, not %s", gib(snapshot.free), gib(needed))
    return snapshot


def claim_gpu(settings: WorkerSettings, profile_result: bytes) -> GpuMemoryProfiler | None:
    """Make this rank's GPU the current CUDA device of this thread, and return its profiler; None on
    CPUs."""
    if settings.device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise InvalidRequest("there is no CUDA device here", param="device")
    torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    sharers = -(-settings.ranks_here // torch.cuda.device_count()) * settings.models_here
    known = pb.ProfileResult.FromString(profile_result).memory
    return GpuMemoryProfiler(CudaMemory(), settings, sharers, known)
