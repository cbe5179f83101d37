"""The weights that outlive a rank: shared memory that its supervisor holds."""

from __future__ import annotations

import os

from surestep_common.errors import InternalError

from surestep_worker.host import shared_memory as memory


class StaleWeights(InternalError):
    """What is held is of no use to the rank that got it: it has to be loaded afresh."""


class HeldWeights:
    """Filled by the first rank, which seals it when it is complete; mapped by those after it."""

    def __init__(self) -> None:
        self.fd = self._create()

    @staticmethod
    def _create() -> int:
        return memory.create("surestep-weights")

    @property
    def sealed(self) -> bool:
        """Whether it is complete."""
        return memory.is_sealed(self.fd)

    @property
    def nbytes(self) -> int:
        """What the next rank need not load."""
        return os.fstat(self.fd).st_size if self.sealed else 0

    def renew(self) -> None:
        """Give up what is there; ranks that have mapped it keep it until they end."""
        os.close(self.fd)
        self.fd = self._create()
