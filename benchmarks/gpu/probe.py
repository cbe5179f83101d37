"""Find all products of this card whose bits differ, where a worker stops at the first.

    PYTHONPATH=... python -m gpu.probe [--out FILE]

What decides which kernels serve (columns/products/probe.py) is asked about weights of two models;
then quantised products are, by instructions of one width against those of all widths.
`--smoke` needs no device: a few products in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
import torch
from surestep_kernels.columns.products.probe import (
    cublas_agrees,
    differences,
    probe_cases,
    width_differences,
)
from surestep_kernels.linear import pack_linear_reference
from surestep_kernels.linear.sequential import TILES
from surestep_kernels.linear.triton import ALL_WIDTHS

from gpu.cases import PACK

# Llama-3.2-1B's and Llama-3.1-8B's: N, K of every product but the logits.
SHAPES = (
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
)
QUANTISED = ("fp8", "int4", "fp8 rows")


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, print, write line by line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="also write this to a file, as JSON")
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.smoke else "cuda")
    about = machine.describe() | machine.accelerator(device.type)
    lines: list[dict[str, Any]] = []
    began = time.perf_counter()
    with torch.inference_mode():
        for line in _asked(device, smoke=args.smoke):
            lines.append(line | {"at_s": round(time.perf_counter() - began, 1)})
            print(lines[-1], flush=True)
            machine.write(args.out, about, probe=lines)


def _asked(device: torch.device, *, smoke: bool) -> Iterator[dict[str, Any]]:
    shapes = ((40, 96),) if smoke else SHAPES
    weights = [
        pack_linear_reference(torch.randn(shape, device=device).bfloat16()) for shape in shapes
    ]
    rows, tiles = ({"rows": 3}, TILES[:2]) if smoke else ({}, TILES)
    for trial in probe_cases(weights, device, **rows):
        differ = differences(trial, tiles)
        yield {"trial": trial.name, "compared": len(tiles), "differ": differ}
        if smoke:
            break
    for packed in () if smoke else weights:
        shape = list(packed.data.shape)
        yield {"trial": f"cuBLAS {shape}", "agrees": cublas_agrees(packed)}
    yield from _of_widths(device, smoke=smoke)


def _of_widths(device: torch.device, *, smoke: bool) -> Iterator[dict[str, Any]]:
    """Yield what a narrower instruction gives other bits for than the widest, by formats."""
    columns, depth, most = (128, 256, 2) if smoke else (4096, 4096, None)
    for name in QUANTISED:
        packed = PACK[name.split()[0]](device.type, columns, depth)
        differ = width_differences(packed, fp8_rows=name == "fp8 rows", most=most)
        yield {"trial": f"widths {name}", "compared": list(ALL_WIDTHS), "differ": differ}


if __name__ == "__main__":
    main()
