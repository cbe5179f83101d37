"""Run the C compiler: its flags, and its errors."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
TIMEOUT_S = 280.0  # where a server waits for it: --load-timeout-s is 300
_MOST_COMPILERS = 4  # at once: each takes 240 MB, of one source 460 MB


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


def compile_library(
    compiler: str, target_flags: Sequence[str], library: Path, timeout_s: float | None = TIMEOUT_S
) -> None:
    """Compile the sources to `library`, one on each core; None = no limit. Raises BuildError."""
    sources = sorted(SOURCES.rglob("*.c"))
    began = time.monotonic()
    deadline = None if timeout_s is None else began + timeout_s
    flags = (*FLAGS, *target_flags, f"-I{SHARED}")
    pool = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_COMPILERS))
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [f"{scratch}/{number}.o" for number in range(len(sources))]

        def compile_one(source: Path, to: str) -> None:
            _run((compiler, *flags, "-c", "-o", to, str(source)), scratch, deadline)

        try:
            for _ in pool.map(compile_one, sources, objects):
                pass
            _run((compiler, *flags, "-o", str(library), *objects, "-lm"), scratch, deadline)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took longer than {timeout_s:.0f} s") from error
        finally:
            pool.shutdown(cancel_futures=True)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)


def _run(command: Sequence[str], scratch: str, deadline: float | None) -> None:
    """Run the compiler. Raises BuildError, and TimeoutExpired behind the deadline."""
    try:
        subprocess.run(  # noqa: S603 - our own sources and flags
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=None if deadline is None else max(0.0, deadline - time.monotonic()),
            env=child_environ({"TMPDIR": scratch}),
        )
    except FileNotFoundError as error:
        raise BuildError(f"no compiler: {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr.strip()[-400:]}") from error


def compiler_version(compiler: str) -> str:
    """Return the first line that the compiler says of itself, or why it says none."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that would be run anyway
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}, which fails: {error}"
    return done.stdout.partition("\n")[0]
