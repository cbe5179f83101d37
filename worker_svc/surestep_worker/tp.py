"""Tensor parallelism: the collectives of one rank group."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from surestep_common.errors import Unavailable
from torch import Tensor

from .rendezvous import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TensorParallel:
    """Collectives among `size` ranks. Alone (size 1) every one of them is a no-op.

    Every rank calls the same collectives in the same order; a rank that does not arrive makes the
    others raise RuntimeError when the timeout of `connect` has passed.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: ProcessGroup | None = None) -> None:
        assert 0 <= rank < size
        assert (group is not None) == (size > 1), "ranks of a group come from connect()"
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def connect(
        cls, rank: int, size: int, address: str, device: str, timeout_s: float
    ) -> TensorParallel:
        """Join the group whose rank 0 listens at `address` ("host:port"): NCCL on cuda, else gloo.

        `timeout_s` bounds this call and, afterwards, each collective. Raises Unavailable when the
        group does not come together in time.
        """
        if size == 1:
            return cls()
        from torch import distributed

        cuda = device.startswith("cuda")
        try:
            store = meet(rank, size, address, timeout_s)
            distributed.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=torch.device(device) if cuda else None,
            )
        except (distributed.DistError, RuntimeError) as error:
            raise Unavailable(f"rank {rank} found no group of {size} at {address}") from error
        return cls(rank, size, distributed.group.WORLD)

    def close(self) -> None:
        """Leave the group. Further collectives are a bug."""
        if self._group is None:
            return
        from torch import distributed

        with contextlib.suppress(RuntimeError):  # the other ranks may be gone already
            distributed.destroy_process_group(self._group)
        self._group = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns x. The bits are equal on all ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' x [..., n], all of one shape, along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Copy rank 0's x into every rank's x; returns x."""
        if self.size > 1:
            torch.distributed.broadcast(x, src=0, group=self._group)
        return x
