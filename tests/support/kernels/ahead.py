"""Libraries compiled ahead, kept between runs: all of C takes half a minute for each target."""

from __future__ import annotations

import os
from pathlib import Path

from surestep_kernels.columns.cpu.build import default_cache
from surestep_kernels.columns.cpu.compiling import compile_library
from surestep_kernels.columns.cpu.prebuilt import Target


def compiled_ahead(target: Target) -> Path:
    """Return the library for a target, compiled when there is none of these sources."""
    file = target.file(default_cache() / "ahead")
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        compile_library("cc", target.flags, fresh)
        fresh.replace(file)
    return file
