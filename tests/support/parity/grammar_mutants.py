"""`python -m support.parity.grammar_mutants ...`: grammars' processes with a bug, named by MUTANT."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from surestep_worker.grammar import compiler, process, window
from surestep_worker.grammar.walk import Walk
from surestep_worker.grammar.window import Window

_NAME = "MUTANT"


def masks_are_those_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    def late(walk: Walk, into: Window, place: int, num_words: int) -> Any:
        words = original(walk, into, place, num_words)
        if len(into.masks) > 1:
            into.masks[-1] = into.masks[-2]
        return words

    original = window._add_mask
    patch.setattr(window, "_add_mask", late)


def drafts_advance_the_request_itself(patch: pytest.MonkeyPatch) -> None:
    """A draft that is rejected has moved the matcher on."""
    patch.setattr(Walk, "copy", lambda self: self)


def the_end_is_always_allowed(patch: pytest.MonkeyPatch) -> None:
    def fill(self: Walk, words: Any) -> None:
        original(self, words)
        np.bitwise_or.at(words, self._stop_words, self._stop_bits)

    original = Walk.fill
    patch.setattr(Walk, "fill", fill)


IN_PROCESSES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    mutate.__name__: mutate
    for mutate in (
        masks_are_those_of_the_position_before,
        drafts_advance_the_request_itself,
        the_end_is_always_allowed,
    )
}


def mutated(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what has compilers that are made from now on start processes with this bug."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setenv(_NAME, name)
        patch.setattr(compiler, "PROGRAM", __name__)

    return mutate


if __name__ == "__main__":
    IN_PROCESSES[os.environ[_NAME]](pytest.MonkeyPatch())
    sys.exit(process.main(sys.argv[1:]))
