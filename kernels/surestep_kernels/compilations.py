"""Count kernels compiled at run time; all of them should be compiled before the first request."""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Watch(Protocol):
    """Told of late compilations, so that the compiler is not taken for a step that hangs."""

    def compiling(self) -> None:
        """A compilation begins."""

    def compiled(self) -> None:
        """It is done."""


class Compilations:
    """Counts late compilations, each of which holds up a step for as long as the compiler takes."""

    def __init__(self) -> None:
        self._watch: Watch | None = None
        self.num_late = 0

    def serve(self, watch: Watch) -> None:
        """Count every compilation from now on as late, and tell `watch` of it."""
        self._watch = watch

    def begin(self) -> None:
        """Record that a kernel is about to be compiled, or loaded from a cache of such kernels."""
        if self._watch is not None:
            self._watch.compiling()

    def end(self, kernel: str) -> None:
        """Record that it is there."""
        if self._watch is not None:
            self._watch.compiled()
            self.num_late += 1
            logger.warning("kernel %s was compiled while serving", kernel)
