"""Compiles the C kernels for the machine they run on, once, and keeps them in a cache folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from surestep_common.config import cache_dir, child_environ

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
TARGET_FLAG = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
FLAGS = (
    "-std=gnu11",
    "-O2",  # the hot loops are unrolled by hand; more only takes longer
    TARGET_FLAG,
    "-ffp-contract=off",  # multiply-adds are fused where the source says so: see cpu/vec.h
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
)
TIMEOUT_S = 120.0
_ROOM = 16 << 20  # bytes for the compiler's files
_MEMORY = (Path("/dev/shm"),)  # noqa: S108  # where there is room when no disk has any


class BuildError(Exception):
    """The C kernels cannot be compiled here."""


def build_library(cache: Path | None = None, compiler: str = "cc") -> bytes:
    """The compiled library, from the cache if it is there.

    Concurrent builds are safe: each compiles a file of its own and renames it into place. Where the
    cache cannot be written, the library is compiled elsewhere and not kept. Raises BuildError when
    there is no compiler, it fails, or there is room nowhere.
    """
    folder = (cache or default_cache()) / build_key()
    library = folder / "libsurestep.so"
    with contextlib.suppress(OSError):
        return library.read_bytes()
    if shutil.which(compiler) is None:
        raise BuildError(f"no compiler: {compiler}")
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


def _build(folder: Path | None, compiler: str, keep: Path | None = None) -> bytes:
    """Compile in a temporary folder, inside `folder` if given; move the library to `keep`."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        left = shutil.disk_usage(scratch).free
        if left < _ROOM:  # the compiler would find out after some seconds
            raise BuildError(f"{left} bytes are left on the disk")
        fresh = Path(scratch) / "libsurestep.so"
        _compile(compiler, fresh)
        code = fresh.read_bytes()
        if keep is not None:
            fresh.replace(keep)
        return code


@functools.cache
def file_of(code: bytes) -> Path:
    """A name by which this process can load a library that it has in memory; always the same one,
    so that it is loaded once. Raises OSError."""
    fd = os.memfd_create("surestep-kernels", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(code)
    return Path(f"/proc/self/fd/{fd}")


def default_cache() -> Path:
    """Where compiled kernels are kept between runs."""
    return cache_dir() / "kernels"


def build_key() -> str:
    """Digest of everything that the library depends on: sources, flags and processor."""
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine(), _cpu_flags())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, library: Path) -> None:
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    began = time.monotonic()
    try:
        subprocess.run(  # noqa: S603 - our own sources and flags
            [compiler, *FLAGS, "-o", str(library), *sources, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=child_environ({"TMPDIR": str(library.parent)}),
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[-400:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {TIMEOUT_S:.0f} s") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)
