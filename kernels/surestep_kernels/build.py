"""Compiles the C kernels for the machine they run on, once, into a cache folder."""

from __future__ import annotations

import hashlib
import logging
import platform
import subprocess
import tempfile
import time
from pathlib import Path

from surestep_common.config import cache_dir

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


class BuildError(Exception):
    """The C kernels cannot be compiled here."""


def build_library(cache: Path | None = None, compiler: str = "cc") -> Path:
    """Path of the compiled library, building it unless the cache has it.

    Concurrent builds are safe: each compiles a file of its own and renames it into place.
    Raises BuildError when there is no compiler, it fails, or the cache cannot be written.
    """
    folder = (cache or default_cache()) / build_key()
    library = folder / "libsurestep.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / library.name
            _compile(compiler, fresh)
            fresh.replace(library)
    except OSError as error:
        raise BuildError(str(error)) from error
    return library


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
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[-400:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {TIMEOUT_S:.0f} s") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)
