"""Print the card, its driver and the versions of what runs on it; a line of JSON.

    PYTHONPATH=... python -m gpu.versions [--device cuda] [--out FILE]

What nvidia-smi and its like print follows, for who reads the log.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import machine
import triton

from gpu.decode import copy_bandwidth

_TOLD = ("torch", "triton", "transformers", "grpcio", "protobuf", "pydantic", "pytest", "numpy")
_COMMANDS = (["nvidia-smi"], ["nvcc", "--version"], ["gcc", "--version"], ["df", "-h", "."])


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="also write this to a file, as JSON")
    args = parser.parse_args(argv)
    about = machine.describe() | machine.accelerator(args.device)
    found = {
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in distributions() if d.name in _TOLD},
        "interpreted": triton.knobs.runtime.interpret,
        "tools": [name for name in ("ncu", "compute-sanitizer") if shutil.which(name)],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "copy_gb_s": round(copy_bandwidth(args.device) / 1e9, 1),
    }
    print(json.dumps(about | found), flush=True)
    machine.write(args.out, about, versions=found)
    for command in _COMMANDS:
        if shutil.which(command[0]):
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
