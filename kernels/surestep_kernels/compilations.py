"""Kernels that are compiled at run time: all of them should be before the first request comes."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Compilations:
    """Counts those that came too late: each holds up a step for as long as a compiler takes."""

    def __init__(self) -> None:
        self._serving = False
        self.num_late = 0

    def serve(self) -> None:
        """From now on nothing should be compiled."""
        self._serving = True

    def note(self, kernel: str) -> None:
        """A kernel was compiled, or loaded from a cache of compiled ones."""
        if self._serving:
            self.num_late += 1
            logger.warning("kernel %s was compiled while serving", kernel)
