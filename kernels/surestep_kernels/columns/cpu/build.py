"""The compiled C kernels: prebuilt for this kind of processor, or compiled here once and cached."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

from surestep_common.config import cache_dir

from .compiling import (
    THIS_PROCESSOR,
    BuildError,
    compile_library,
    compiler_version,
    made_from,
    processor_features,
)
from .prebuilt import PREBUILT, fitting, load_prebuilt, why_no_prebuilt

logger = logging.getLogger(__name__)

_NAME = "libsurestep.so"
_ROOM = 16 << 20  # bytes for the compiler's files
_MEMORY = (Path("/dev/shm"),)  # noqa: S108  # where there is room when no disk has any


def build_library(
    cache: Path | None = None, compiler: str = "cc", prebuilt: Path = PREBUILT
) -> bytes:
    """Return the library: prebuilt, from the cache, or compiled now, in that order.

    Concurrent builds are safe: each compiles its own file and renames it into place. If the cache
    cannot be written, the library is compiled elsewhere and not kept. Raises BuildError if there is
    no compiler, it fails, or there is no room on disk.
    """
    with contextlib.suppress(OSError):
        if (code := load_prebuilt(prebuilt)) is not None:
            return code
    folder = (cache or default_cache()) / build_key()
    library = folder / _NAME
    with contextlib.suppress(OSError):
        return library.read_bytes()
    if shutil.which(compiler) is None:
        raise BuildError(
            f"no C compiler ({compiler}), and {why_no_prebuilt(prebuilt)}: install gcc"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _build(folder, compiler, keep=library)
    except (OSError, BuildError) as error:
        logger.warning("the compiled kernels cannot be kept in %s: %s", folder, error)
        why = str(error)
    for place in (None, *_MEMORY):
        with contextlib.suppress(OSError, BuildError):
            return _build(place, compiler)
    raise BuildError(why)


def inventory(
    cache: Path | None = None, compiler: str = "cc", prebuilt: Path = PREBUILT
) -> dict[str, str]:
    """Return this processor's best instructions and the kernels that `build_library` takes."""
    fits = fitting(platform.machine(), set(processor_features().split()))
    ahead = [target.name for target in fits if target.file(prebuilt).is_file()]
    if ahead:
        kernels = f"prebuilt for {ahead[0]}"
    elif ((cache or default_cache()) / build_key() / _NAME).is_file():
        kernels = "compiled here"
    elif shutil.which(compiler) is not None:
        kernels = f"to be compiled at the first start by {compiler_version(compiler)}"
    else:
        kernels = f"reference, with --allow-slow: no C compiler, and {why_no_prebuilt(prebuilt)}"
    return {"instructions": fits[0].name if fits else "compiled for none", "kernels": kernels}


def _build(folder: Path | None, compiler: str, keep: Path | None = None) -> bytes:
    """Compile in a temporary folder, inside `folder` if given; move the library to `keep`."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        left = shutil.disk_usage(scratch).free
        if left < _ROOM:  # the compiler would fail only after some seconds
            raise BuildError(f"{left} bytes are left on the disk")
        fresh = Path(scratch) / _NAME
        compile_library(compiler, (THIS_PROCESSOR,), fresh)
        code = fresh.read_bytes()
        if keep is not None:
            fresh.replace(keep)
        return code


@functools.cache
def file_of(code: bytes) -> Path:
    """Return a file name by which this process can load a library held in memory.

    The same code always gets the same name, so that it is loaded once. Raises OSError.
    """
    fd = os.memfd_create("surestep-kernels", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(code)
    return Path(f"/proc/self/fd/{fd}")


def default_cache() -> Path:
    """Return the folder in which compiled kernels are kept between runs."""
    return cache_dir() / "kernels"


def build_key() -> str:
    """Return a digest of everything that a library compiled here depends on."""
    return made_from(THIS_PROCESSOR, platform.machine(), processor_features())
