"""The weights that outlive a rank: shared memory that its supervisor holds."""

from __future__ import annotations

import os

from surestep_common.errors import InternalError

from surestep_worker.host import shared_memory as memory


class StaleWeights(InternalError):
    """The held weights are of no use to the rank that received them: load them again."""


class HeldWeights:
    """Filled by the first rank, which seals them once complete; mapped by the ranks after it."""

    def __init__(self) -> None:
        self.fd = self._create()

    @staticmethod
    def _create() -> int:
        return memory.create("surestep-weights")

    @property
    def sealed(self) -> bool:
        """Whether the weights are complete."""
        return memory.is_sealed(self.fd)

    @property
    def nbytes(self) -> int:
        """Bytes that the next rank need not load."""
        return os.fstat(self.fd).st_size if self.sealed else 0

    def renew(self) -> None:
        """Replace the memory by an empty one; ranks that have mapped the old one keep it until they
        end."""
        os.close(self.fd)
        self.fd = self._create()
