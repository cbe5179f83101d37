"""Count kernels compiled at run time; all of them should be compiled before the first request."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Compilations:
    """Counts late compilations, each of which holds up a step for as long as the compiler takes."""

    def __init__(self) -> None:
        self._serving = False
        self.num_late = 0

    def serve(self) -> None:
        """Count every compilation from now on as late."""
        self._serving = True

    def note(self, kernel: str) -> None:
        """Record that a kernel was compiled, or loaded from a cache of compiled kernels."""
        if self._serving:
            self.num_late += 1
            logger.warning("kernel %s was compiled while serving", kernel)
