"""A GPU's room for the caches of a rank: measured with all else that a rank needs in its place.

Before a rank takes anything it looks at its GPU. With the model loaded it is assembled once with
caches of next to nothing, compiles and captures what it will serve with, and runs the largest
steps. What its part of the GPU has left then is for the caches that it is assembled with.
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

_RETURN_S = 20.0  # for the driver to take back what a dead process had
_LOOK_EVERY_S = 0.1
_REMEDIES = (
    "lower --max-num-batched-tokens or --max-num-seqs, or use more GPUs or a quantised checkpoint"
)


class GpuMemoryProfiler:
    """The memory of one rank's GPU. Made before the rank takes any of it."""

    def __init__(
        self,
        card: GpuMemory,
        settings: WorkerSettings,
        sharers: int = 1,
        known: pb.DeviceMemory | None = None,
    ) -> None:
        """`sharers` ranks of the group are on this GPU; an earlier rank has had what is `known`.

        Waits, but not for long, until that much is free. Raises OutOfMemory where somebody has
        asked for a part of the GPU that is not free.
        """
        self._card, given = card, settings.model_fields_set
        sized = not given.isdisjoint(("kv_cache_memory", "num_gpu_blocks_override"))
        fraction = None if sized else settings.gpu_memory_utilization
        self._part = MemoryShare(fraction, "gpu_memory_utilization" in given, sharers)
        self._usage: Usage | None = None
        self._limit: int | None = None
        if known is not None and known.limit:
            self._start = _wait_for(card, _all_of(known))
        else:
            self._start = card.snapshot()
            self._limit = memory_limit(self._part, self._start)

    def measure(self, assemble: Callable[[], Runner], tp: TensorParallel) -> int:
        """Bytes for caches on every rank of the group. What is assembled is dropped again.

        Raises OutOfMemory where there is no room for any.
        """
        if self._limit is None:
            self._limit = memory_limit(self._part, self._start)
        try:
            self._usage = self._measured(assemble)
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            message = f"the weights leave no room for the largest step: {said}; {_REMEDIES}"
            raise OutOfMemory(message) from error
        self._card.release()
        left = left_for_caches(self._limit, self._usage, self._card.snapshot())
        least = int(tp.all_gather(torch.tensor([left])).min())
        if not least:
            raise self._no_room(self._limit, self._usage)
        return least

    def report(self, caches: int) -> pb.DeviceMemory:
        """Where the memory is, in the log too. After `measure`."""
        usage, limit = self._usage, self._limit
        assert usage is not None
        assert limit is not None
        context = dict(zip(Usage._fields, usage, strict=True)) | {"caches": caches}
        told = ", ".join(f"{name} {gib(size)}" for name, size in context.items())
        spare = gib(limit - usage.total - caches)
        total = self._start.total
        logger.info(
            "memory of the GPU: %s of %s: %s, spare %s", gib(limit), gib(total), told, spare
        )
        return pb.DeviceMemory(total=total, limit=limit, **context)

    def _measured(self, assemble: Callable[[], Runner]) -> Usage:
        card = self._card
        card.release()
        loaded = card.snapshot()
        runner = assemble()
        assembled = card.snapshot()
        runner.prepare()
        card.release()  # but for graphs, and what is loaded with kernels, all is given back
        prepared = card.snapshot()
        run_largest_steps(runner)
        return Usage(
            weights=bytes_taken(self._start, loaded),
            states=bytes_taken(loaded, assembled),
            graphs=max(0, bytes_taken(assembled, prepared), runner.graph_bytes),
            step=bytes_taken(prepared, card.snapshot()),
        )

    def _no_room(self, limit: int, usage: Usage) -> OutOfMemory:
        part, taken_by = self._part, zip(Usage._fields, usage, strict=True)
        told = ", ".join(f"{name} {gib(size)}" for name, size in taken_by)
        if part.fraction is None:
            of, remedy = "what is free on the GPU", "end what else runs there"
        else:
            of = f"--gpu-memory-utilization {part.fraction:g}"
            remedy = "raise it" if limit < self._start.free else "end what else runs there"
        return OutOfMemory(
            f"{of}: nothing of {gib(limit)} is left for KV blocks: {told}; {remedy}, {_REMEDIES}",
            param="gpu_memory_utilization",
        )


def _all_of(known: pb.DeviceMemory) -> int:
    return known.weights + known.states + known.graphs + known.step + known.caches


def _wait_for(card: GpuMemory, needed: int) -> MemorySnapshot:
    """The last look: at `needed` free bytes, or at what was free in the end."""
    until, look = time.monotonic() + _RETURN_S, card.snapshot()
    if look.free < needed:
        logger.info("waiting for %s of the GPU: %s are free", gib(needed), gib(look.free))
    while look.free < needed and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        look = card.snapshot()
    if look.free < needed:
        logger.warning("going on with %s of the GPU, not %s", gib(look.free), gib(needed))
    return look


def claim_gpu(settings: WorkerSettings, profile_result: bytes) -> GpuMemoryProfiler | None:
    """What "cuda" means on this thread from here on: the GPU that is this rank's, and its memory,
    of which an earlier rank has had what its profile_result tells."""
    if settings.device != "cuda":
        return None
    if not torch.cuda.is_available():
        raise InvalidRequest("there is no CUDA device here", param="device")
    torch.cuda.set_device(settings.rank % torch.cuda.device_count())
    sharers = -(-settings.ranks_here // torch.cuda.device_count())
    known = pb.WorkerInfo.FromString(profile_result).memory
    return GpuMemoryProfiler(CudaMemory(), settings, sharers, known)
