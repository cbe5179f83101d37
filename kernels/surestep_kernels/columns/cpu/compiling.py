"""Run the C compiler: its flags, and its errors."""

from __future__ import annotations

import hashlib
import logging
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from surestep_common.config import child_environ

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[2]  # of the ops in their folders, and shared ones here
SHARED = Path(__file__).parent  # headers
FLAGS = (
    "-std=gnu11",
    "-O2",  # the hot loops are unrolled by hand; more only takes longer
    "-ffp-contract=off",  # multiply-adds are fused where the source says so: see columns/cpu/vec.h
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
)
THIS_PROCESSOR = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
TIMEOUT_S = 120.0


class BuildError(Exception):
    """The C kernels cannot be compiled here."""


def made_from(*others: str) -> str:
    """Return a digest of the sources, the flags for all processors and other inputs."""
    digest = hashlib.sha256(" ".join((*FLAGS, *others)).encode())
    for source in sorted(SOURCES.rglob("*.[ch]")):
        name = source.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def processor_features() -> str:
    """Return the processor's features as Linux lists them, separated by spaces."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return line.partition(":")[2]


def compile_library(compiler: str, target_flags: Sequence[str], library: Path) -> None:
    """Compile the sources to `library`. Raises BuildError."""
    sources = sorted(str(path) for path in SOURCES.rglob("*.c"))
    began = time.monotonic()
    try:
        subprocess.run(  # noqa: S603 - our own sources and flags
            [compiler, *FLAGS, *target_flags, f"-I{SHARED}", "-o", str(library), *sources, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=child_environ({"TMPDIR": str(library.parent)}),
        )
    except FileNotFoundError as error:
        raise BuildError(f"no compiler: {compiler}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler} failed: {error.stderr.strip()[-400:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {TIMEOUT_S:.0f} s") from error
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)
