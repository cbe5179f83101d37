"""Arithmetic of a GPU's memory: what a rank may take of it, and what it has taken.

All of it is computed from looks at the GPU, which only CudaMemory takes.
"""

from __future__ import annotations

import gc
import logging
from typing import NamedTuple, Protocol

import torch

from surestep_worker.host.host_memory import GIB, OutOfMemory

logger = logging.getLogger(__name__)

# The driver hands out pages of this size, and torch begins every large tensor at a new one.
PAGE = 2 << 20


class MemorySnapshot(NamedTuple):
    """Bytes of a GPU at one moment."""

    free: int  # for anybody
    total: int
    reserved: int  # by torch, in this process: no part of `free`, whether in use or not


class GpuMemory(Protocol):
    """The GPU of a rank."""

    def snapshot(self) -> MemorySnapshot:
        """When everything that was launched is over."""

    def release(self) -> None:
        """Give back what torch holds and nobody uses."""


class CudaMemory:
    """The current CUDA device."""

    def snapshot(self) -> MemorySnapshot:
        """See GpuMemory."""
        torch.cuda.synchronize()
        return MemorySnapshot(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())

    def release(self) -> None:
        """See GpuMemory."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class MemoryShare(NamedTuple):
    """Of a GPU's memory, as the settings say."""

    fraction: float | None  # of all of it; None: whatever is free, as the caches' size is given
    asked: bool  # somebody has named the fraction
    sharers: int = 1  # ranks of this group on this GPU


class Usage(NamedTuple):
    """Bytes of all but the caches, in the order in which they are taken."""

    weights: int
    states: int  # tables of all slots, and recurrent states
    graphs: int  # of all shapes of step that will be captured
    step: int  # what the largest step needs while it runs

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def memory_limit(part: MemoryShare, start: MemorySnapshot) -> int:
    """Bytes that a rank may take which saw `start` before it took any.

    A fraction that was asked for is this rank's, whatever else lies on the GPU, and has to be free.
    Where it is only the default, what others hold comes off it. Raises OutOfMemory.
    """
    if part.fraction is None:
        return start.free // part.sharers
    share = int(part.fraction * start.total) // part.sharers
    if share <= start.free and part.asked:
        return share
    if part.asked:
        raise OutOfMemory(
            f"--gpu-memory-utilization {part.fraction:g}: {gib(share)} of {gib(start.total)} "
            f"for this rank, but only {gib(start.free)} are free: other processes hold the rest; "
            f"end them, or go down to {_floor(start.free * part.sharers / start.total)}",
            param="gpu_memory_utilization",
        )
    kept = start.total - int(part.fraction * start.total)  # for nobody
    if share * part.sharers > start.free:
        logger.warning(
            "only %s of the %s of the GPU are free: this engine takes what leaves %s of them",
            *map(gib, (start.free, start.total, kept)),
        )
    return max(0, min(share, (start.free - kept) // part.sharers))


def bytes_taken(before: MemorySnapshot, after: MemorySnapshot) -> int:
    """Bytes that this process has taken in between.

    torch tells of its own exactly. The rest, such as code, communicators and graphs, shows in what
    is free, where others may take and give back too: what they gave back is not subtracted.
    """
    of_torch = after.reserved - before.reserved
    return max(before.free - after.free, of_torch)


def left_for_caches(limit: int, usage: Usage, now: MemorySnapshot) -> int:
    """Bytes of `limit` that are nobody's; `now` is looked at when graphs and steps have given back
    theirs, which they will take again."""
    to_come = usage.graphs + usage.step
    return max(0, min(limit - usage.total, now.free - to_come))


def gib(size: int) -> str:
    """For people."""
    return f"{size / GIB:.2f} GiB"


def _floor(fraction: float) -> str:
    return f"{int(fraction * 100) / 100:.2f}"
