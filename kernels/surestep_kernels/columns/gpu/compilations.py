"""Compilations of Triton: where they are kept, and who is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from surestep_common.errors import InvalidRequest
from triton import knobs

from surestep_kernels.compilations import Compilations


def check_kernel_cache() -> None:
    """Raise InvalidRequest if Triton could not load compiled kernels from its cache folder.

    Docker mounts every tmpfs noexec unless it is told otherwise; loading would end in a bare
    ImportError.
    """
    folder, remedy = Path(knobs.cache.dir), "set TRITON_CACHE_DIR to another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        raise InvalidRequest(f"kernels cannot be kept in {folder}: {error}; {remedy}") from None
    if flags & os.ST_NOEXEC or flags & os.ST_RDONLY or not os.access(folder, os.W_OK):
        how = "mounted noexec" if flags & os.ST_NOEXEC else "not writable"
        raise InvalidRequest(f"kernels cannot be kept in {folder}: it is {how}; {remedy}")


def watch_compilations() -> Compilations:
    """Count what this process compiles from now on; results of earlier calls stop counting."""
    compilations = Compilations()

    def begins(**_: Any) -> bool:
        compilations.begin()
        return False  # Triton would go without the kernel

    def ended(*, repr: str, **_: Any) -> None:  # noqa: A002  # Triton names it
        compilations.end(repr)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = ended
    return compilations
