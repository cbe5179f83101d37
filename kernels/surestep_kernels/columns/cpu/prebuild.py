"""Compile the C kernels for images: `python -m surestep_kernels.columns.cpu.prebuild`.

Followed by `[MACHINE [FOLDER]]`, compiles all libraries of a machine (x86_64 or aarch64; this one
by default, another with a cross compiler) into the folder in which they are looked up.
"""

from __future__ import annotations

import logging
import platform
import sys
from pathlib import Path

from surestep_common import log

from .compiling import BuildError, compile_library
from .prebuilt import PREBUILT, TARGETS

logger = logging.getLogger(__name__)
_ERROR = 1  # exit status
_USAGE_ERROR = 2


def build_all(folder: Path, machine: str) -> list[Path]:
    """Compile a library for each target of `machine` that `folder` has none of, for as long as
    it takes. Raises BuildError, OSError."""
    compiler = "cc" if machine == platform.machine() else f"{machine}-linux-gnu-gcc"
    folder.mkdir(parents=True, exist_ok=True)
    files = [target.file(folder) for target in TARGETS[machine]]
    for target, file in zip(TARGETS[machine], files, strict=True):
        if not file.is_file():
            fresh = file.with_suffix(".fresh")  # an interrupted build leaves no library behind
            compile_library(compiler, target.flags, fresh, timeout_s=None)
            fresh.replace(file)
    return files


def main(machine: str = "", folder: Path | str = PREBUILT) -> int:
    log.configure("kernels")
    machine = machine or platform.machine()
    if machine not in TARGETS:
        logger.error("%s: kernels are compiled ahead for %s", machine, " and ".join(TARGETS))
        return _USAGE_ERROR
    try:
        for file in build_all(Path(folder), machine):
            logger.info("%s", file)
    except (BuildError, OSError) as error:
        logger.error("%s", error)
        return _ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
