"""Tensor parallelism: the collectives of one rank group."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from surestep_common.errors import Unavailable
from torch import Tensor

from . import peer_memory
from .peer_memory import PeerMemory
from .rendezvous import find_missing_rank, join_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


class SumMethod(Enum):
    """Method that adds up the values of the ranks."""

    BACKEND = auto()  # NCCL or gloo, in an order of its choice
    PEERS = auto()  # every rank in peer memory, in the order of ranks
    GATHER = auto()  # every rank after gathering all values, in the order of ranks


def sum_method(dtype: torch.dtype, size: int, *, peers: bool) -> SumMethod:
    """Choose a method that never depends on the batch: a row's sum has equal bits in every batch.

    Otherwise speculation could change a token. NCCL and gloo choose the order in which they add by
    the size of a message and the place in it; only a sum of two values is the same in any order.
    """
    if peers and dtype in peer_memory.DTYPES:
        return SumMethod.PEERS
    return SumMethod.BACKEND if size == 2 or not dtype.is_floating_point else SumMethod.GATHER


class TensorParallel:
    """Collectives among `size` ranks. With size 1 each of them is a no-op.

    Every rank calls the same collectives in the same order. If a rank does not arrive, the others
    raise RuntimeError once the timeout is over; on a GPU that ends their processes, unless the
    step's deadline has done so before.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: ProcessGroup | None = None,
        peers: PeerMemory | None = None,
        store: Store | None = None,
    ) -> None:
        assert 0 <= rank < size
        assert (group is not None) == (size > 1), "ranks of a group come from connect()"
        self.rank = rank
        self.size = size
        self._group = group
        self._peers = peers
        self._store = store

    @classmethod
    def connect(
        cls, rank: int, size: int, address: str, device: str, timeout_s: float
    ) -> TensorParallel:
        """Join the group whose rank 0 listens at `address` ("host:port").

        Tensors on the host travel by gloo; on `device` "cuda", those on the current GPU by NCCL.
        `timeout_s` bounds this call and, until `bound`, each collective. Raises Unavailable
        if the group is not complete in time.
        """
        if size == 1:
            return cls()
        from torch import distributed

        cuda = device.startswith("cuda")
        try:
            store = join_group(rank, size, address, timeout_s)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
            )
            group = distributed.group.WORLD
            assert group is not None
            peers = PeerMemory.share(group) if cuda else None
        except (distributed.DistError, RuntimeError) as error:
            raise Unavailable(f"rank {rank} found no group of {size} at {address}") from error
        return cls(rank, size, group, peers, store)

    def bound(self, timeout_s: float) -> None:
        """Bound each further collective, in which all wait for the slowest rank.

        An older PyTorch keeps the bound that a group was made with.
        """
        if self._group is not None and hasattr(self._group, "set_timeout"):
            self._group.set_timeout(timedelta(seconds=timeout_s))

    def check_peers(self) -> None:
        """Raise Unavailable if a rank of the group is known to be gone; it cannot rejoin this
        group. Called between epochs, when no collective would show it."""
        missing = find_missing_rank(self._store, self.rank, self.size) if self._store else None
        if missing is not None:
            raise Unavailable(f"{missing} has left the group")

    def close(self) -> None:
        """Leave the group. Further collectives are a bug."""
        if self._group is None:
            return
        from torch import distributed

        with contextlib.suppress(RuntimeError):  # the other ranks may be gone already
            distributed.destroy_process_group(self._group)
        self._group = self._peers = self._store = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns x, contiguous. The bits are equal on all ranks."""
        if self.size == 1:
            return x
        peers = self._peers if x.is_cuda else None
        match sum_method(x.dtype, self.size, peers=peers is not None):
            case SumMethod.PEERS:
                assert peers is not None
                peers.all_reduce(x)
            case SumMethod.BACKEND:
                torch.distributed.all_reduce(x, group=self._group)
            case SumMethod.GATHER:
                first, *others = self._gather(x)
                x.copy_(first)
                for other in others:
                    x.add_(other)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' x [..., n], all of one shape, along the last dimension."""
        return x if self.size == 1 else torch.cat(self._gather(x), dim=-1)

    def gather_to_first(self, x: Tensor, width: int) -> Tensor:
        """Concatenate the ranks' x [N, n] to [N, width] on rank 0; return zeros on the others."""
        if self.size == 1:
            return x[:, :width].contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        torch.distributed.gather(x.contiguous(), parts, dst=0, group=self._group)
        if parts is None:
            return x.new_zeros(len(x), width)  # of their own: some models scale them in place
        return torch.cat(parts, dim=1)[:, :width].contiguous()

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        return parts

    def broadcast_columns(self, *columns: Tensor) -> Sequence[Tensor]:
        """Return rank 0's columns, of one shape and type, which travel together."""
        return columns if self.size == 1 else self.broadcast(torch.stack(columns)).unbind()

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's x into every rank's x; returns x."""
        if self.size > 1:
            torch.distributed.broadcast(x, src=0, group=self._group)
        return x
