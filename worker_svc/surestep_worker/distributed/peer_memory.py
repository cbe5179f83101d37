"""Sums over the ranks of one machine, in memory that each of their GPUs reads and writes.

The kernels are torch's (torch.distributed._symmetric_memory). One shot: every rank reads the values
of all ranks and adds them. Two shots: every rank adds its share of them and writes that to all,
which moves less of a large message. Both add rank 1's value to rank 0's, then rank 2's and so on,
and round each time, so the bits do not depend on which of them served a message, nor on the number
of pieces. They only launch kernels, without waiting on the host, so a CUDA graph can contain them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)  # that torch's kernels can add
_BUFFER_BYTES = 16 << 20  # larger messages go in pieces
_ONE_SHOT_BYTES = 256 << 10  # not measured yet: with N ranks, one shot moves N/2 times as much
_ALIGNMENT = 16  # bytes that a thread of the kernels writes at once
_WORD_BYTES, _YES = 256, "yes"
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class RankLocation(NamedTuple):
    """Where a rank runs. Memory is shared through a socket file that is named by process id."""

    files: str  # mount namespace
    processes: str  # process id namespace
    gpu: str  # UUID


class PeerMemory:
    """A buffer on every rank's GPU that all ranks read and write; for one sum at a time."""

    def __init__(self, group: ProcessGroup, buffer: Tensor) -> None:
        """`buffer` u8[B] is known to the other ranks (see `share`)."""
        self._group, self._buffer = group.group_name, buffer

    @classmethod
    def share(cls, group: ProcessGroup) -> PeerMemory | None:
        """Share a buffer; called by all ranks. None on all if some GPU cannot reach another's."""
        if not _all_agree(group, _every_rank_reaches_all(group)):
            logger.info("all-reduce: not every GPU reaches the memory of the others")
            return None
        buffer = _shared_buffer(group)
        if not _all_agree(group, buffer is not None):
            return None
        assert buffer is not None
        logger.info("all-reduce: in peer memory, one shot up to %d KiB", _ONE_SHOT_BYTES >> 10)
        return cls(group, buffer)

    def all_reduce(self, x: Tensor) -> None:
        """Sum x, contiguous and of one of DTYPES, over the ranks, in place."""
        assert x.is_contiguous()
        assert x.data_ptr() % _ALIGNMENT == 0
        ops, group = torch.ops.symm_mem, self._group
        for piece in x.view(-1).split(_BUFFER_BYTES // x.element_size()):
            shared = self._buffer[: piece.nbytes].view(x.dtype)
            # Copy separately: in torch's op that also copies (one_shot_all_reduce_copy), some of a
            # block's threads may signal "written" to the peers before others have written.
            shared.copy_(piece)
            if in_one_shot(piece.nbytes):
                ops.one_shot_all_reduce_out(shared, "sum", group, piece)
            else:
                ops.two_shot_all_reduce_(shared, "sum", group)
                piece.copy_(shared)


def in_one_shot(num_bytes: int) -> bool:
    """Return whether a message is small enough for every rank to read all of it from all others."""
    return num_bytes <= _ONE_SHOT_BYTES


def can_reach_all(
    mine: RankLocation,
    places: Sequence[RankLocation],
    visible: Sequence[str],
    reaches: Callable[[int, int], bool],
) -> bool:
    """Return whether the GPU of `mine` reaches those of all `places`.

    `visible` are the GPUs that this process sees; `reaches` is called with two of their indices.
    """
    own = visible.index(mine.gpu)
    return all(
        place.gpu in visible
        and (place.files, place.processes) == (mine.files, mine.processes)
        and reaches(own, visible.index(place.gpu))
        for place in places
        if place != mine
    )


def _every_rank_reaches_all(group: ProcessGroup) -> bool:
    visible = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    files, processes = (os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "pid"))
    mine = RankLocation(files, processes, visible[torch.cuda.current_device()])
    words = gather_strings(group, " ".join(mine))
    places = [RankLocation._make(word.split()) for word in words]
    return can_reach_all(mine, places, visible, _reaches)


def _reaches(own: int, other: int) -> bool:
    """Return whether one GPU can use another's memory, with atomics, which the kernels' signals
    need.

    Over PCIe there may be access without atomics, and a wait for a signal would then never end.
    """
    atomics, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(atomics), _NATIVE_ATOMICS, own, other)
    return torch.cuda.can_device_access_peer(own, other) and status == 0 and atomics.value == 1


def _shared_buffer(group: ProcessGroup) -> Tensor | None:
    from torch.distributed import _symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        buffer: Tensor = symmetric_memory.empty(_BUFFER_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, group.group_name)
    except RuntimeError:
        logger.warning("all-reduce: the GPUs' memory cannot be shared", exc_info=True)
        return None
    return buffer


def gather_strings(group: ProcessGroup, mine: str) -> list[str]:
    """Return every rank's string, in the order of ranks; sent as plain bytes, not objects."""
    word = bytearray(mine.encode().ljust(_WORD_BYTES))
    assert len(word) == _WORD_BYTES
    said = torch.frombuffer(word, dtype=torch.uint8)
    everyone = [torch.empty_like(said) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, said, group=group)
    return [bytes(other.tolist()).decode().rstrip() for other in everyone]


def _all_agree(group: ProcessGroup, yes: bool) -> bool:
    return all(word == _YES for word in gather_strings(group, _YES if yes else "no"))
