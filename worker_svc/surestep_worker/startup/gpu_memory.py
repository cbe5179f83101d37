"""Arithmetic of a GPU's memory: what a rank may use of it, and what it has used.

Everything is computed from snapshots of the GPU, which only CudaMemory takes.
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
    """Bytes of a GPU's memory at one moment."""

    free: int  # for any process
    total: int
    reserved: int  # by torch, in this process: not part of `free`, whether in use or not


class GpuMemory(Protocol):
    """The memory of a rank's GPU."""

    def snapshot(self) -> MemorySnapshot:
        """Return a snapshot once all launched work is complete."""

    def release(self) -> None:
        """Give back what torch holds without using it."""


class CudaMemory:
    """The memory of the current CUDA device."""

    def snapshot(self) -> MemorySnapshot:
        torch.cuda.synchronize()
        return MemorySnapshot(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class MemoryShare(NamedTuple):
    """The share of a GPU's memory that the settings give a rank."""

    fraction: float | None  # of the total; None: all that is free, as the caches' sizes are set
    explicit: bool  # whether the user has set the fraction
    sharers: int = 1  # ranks of this group on this GPU


class Usage(NamedTuple):
    """Bytes of everything but the caches, in the order in which they are allocated."""

    weights: int
    states: int  # tables of all slots, and recurrent states
    graphs: int  # of all shapes of step that will be captured
    step: int  # what the largest step needs while it runs

    @property
    def total(self) -> int:
        return sum(self)


def memory_limit(part: MemoryShare, start: MemorySnapshot) -> int:
    """Return the bytes that a rank may use, given the snapshot `start` from before it used any.

    A fraction set by the user belongs to this rank, whatever else runs on the GPU, and must be
    free. If it is only the default, what other processes hold is subtracted. Raises OutOfMemory.
    """
    if part.fraction is None:
        return start.free // part.sharers
    share = int(part.fraction * start.total) // part.sharers
    if share <= start.free and part.explicit:
        return share
    if part.explicit:
        raise OutOfMemory(
            f"--gpu-memory-utilization {part.fraction:g}: {gib(share)} of {gib(start.total)} "
            f"for this rank, but only {gib(start.free)} are free: other processes hold the rest; "
            f"end them, or lower it to {_floor(start.free * part.sharers / start.total)}",
            param="gpu_memory_utilization",
        )
    kept = start.total - int(part.fraction * start.total)  # left unused
    if share * part.sharers > start.free:
        logger.warning(
            "only %s of the %s of the GPU are free: this engine leaves %s of them unused",
            *map(gib, (start.free, start.total, kept)),
        )
    return max(0, min(share, (start.free - kept) // part.sharers))


def bytes_taken(before: MemorySnapshot, after: MemorySnapshot) -> int:
    """Return the bytes that this process has allocated between two snapshots.

    torch reports its own exactly. The rest, such as code, communicators and graphs, shows only in
    the free memory, which other processes change too: what they gave back is not subtracted.
    """
    of_torch = after.reserved - before.reserved
    return max(before.free - after.free, of_torch)


def left_for_caches(limit: int, usage: Usage, now: MemorySnapshot) -> int:
    """Return the bytes of `limit` left for caches; `now` is taken after graphs and steps have given
    back their memory, which they will take again."""
    to_come = usage.graphs + usage.step
    return max(0, min(limit - usage.total, now.free - to_come))


def gib(size: int) -> str:
    """Format a size for messages."""
    return f"{size / GIB:.2f} GiB"


def _floor(fraction: float) -> str:
    return f"{int(fraction * 100) / 100:.2f}"
