"""Triton's notifications of what it compiles."""

from __future__ import annotations

from typing import Any

from triton import knobs

from surestep_kernels.compilations import Compilations


def watch_compilations() -> Compilations:
    """Count what this process compiles from now on; results of earlier calls stop counting."""
    compilations = Compilations()

    def compiled(*, repr: str, **_: Any) -> None:  # noqa: A002  # Triton names it
        compilations.note(repr)

    knobs.runtime.jit_post_compile_hook = compiled
    return compilations
