"""Triton's own word on what it compiles."""

from __future__ import annotations

from typing import Any

from triton import knobs

from surestep_kernels.compilations import Compilations


def watch_compilations() -> Compilations:
    """Counts what this process compiles from now on; what an earlier call gave counts no more."""
    compilations = Compilations()

    def compiled(*, repr: str, **_: Any) -> None:  # noqa: A002  # Triton names it
        compilations.note(repr)

    knobs.runtime.jit_post_compile_hook = compiled
    return compilations
