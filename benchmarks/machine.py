"""Machine that a figure was measured on; every benchmark prints it beside its figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def describe() -> dict[str, str | int | float]:
    """CPU, cores, one-minute load average, commit and time, all JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def seconds_since_start() -> float:
    """Since this process was started, the start of the interpreter and all imports included."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(stat[19]) / os.sysconf("SC_CLK_TCK")  # seconds after boot; field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def write(out: Path | None, about: dict[str, Any], **figures: Any) -> None:
    """Figures beside what they were measured on, as JSON in a file of results.

    The file is whole whenever somebody looks, so that it may be written again as figures come in.
    """
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps({"machine": about, **figures}, indent=1) + "\n")
    part.replace(out)


def accelerator(device: str) -> dict[str, str]:
    """The card, and the versions of what runs on it."""
    import torch

    about = {"torch": str(torch.__version__)}
    if device == "cuda":
        import triton

        about |= {"gpu": torch.cuda.get_device_name(), "triton": str(triton.__version__)}
        about |= {"cuda": str(torch.version.cuda)}
    return about


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
