"""The weights that outlive a rank: shared memory that its supervisor holds."""

from __future__ import annotations

import os
from typing import NamedTuple

from surestep_common.errors import InternalError

from surestep_worker.host import shared_memory as memory


class StaleWeights(InternalError):
    """The held weights are of no use to the rank that received them: load them again."""


class WeightFds(NamedTuple):
    """Descriptors of shared memory, one for each checkpoint."""

    model: int
    draft_head: int  # that has a folder of its own; not used without one


class HeldWeights:
    """Filled by the first rank, which seals them once complete; mapped by the ranks after it."""

    def __init__(self) -> None:
        self.fds = WeightFds(_create(), _create())

    @property
    def sealed(self) -> bool:
        """Return whether the model's weights are complete."""
        return memory.is_sealed(self.fds.model)

    @property
    def nbytes(self) -> int:
        """Bytes that the next rank need not load."""
        return sum(os.fstat(fd).st_size for fd in self.fds if memory.is_sealed(fd))

    def take_over(self, fds: WeightFds) -> None:
        """Hold memory that another supervisor has held, instead of one's own, which is empty."""
        old, self.fds = self.fds, fds
        for fd in old:
            os.close(fd)

    def renew(self, *, all_of_it: bool) -> None:
        """Replace memory that was left incomplete, or all of it, by an empty one; ranks that have
        mapped the old one keep it until they end."""
        old = self.fds
        renewed = [fd for fd in old if all_of_it or not memory.is_sealed(fd)]
        self.fds = WeightFds(*(_create() if fd in renewed else fd for fd in old))
        for fd in renewed:
            os.close(fd)


def _create() -> int:
    return memory.create("surestep-weights")
