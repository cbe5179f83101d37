"""What a decode step should take on an H200, by a model of bytes and launches; a table in Markdown.

    PYTHONPATH=proto:common:kernels:worker_svc:tools python benchmarks/gpu_model.py COUNTS...

Nothing is measured: COUNTS are results of gpu_launches.py, each of which becomes a line per model,
and the constants below are assumptions. Every launch waits for the one before it. A product reads
its weight and writes its splits, which the next launch reads back: a sum that takes one split after
another waits for each, one that has all of them under way waits for the program that reads most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from surestep_kernels.gpu.splits import steps_per_split

PAPER, COPY = 4.8e6, 4.3e6  # bytes per us: of the data sheet, and as a copy is known to reach
GAP = 1.2  # us between launches that depend on each other
SMALL = 1.8  # us of a launch with next to nothing to do
RAMP = 2.2  # us until a product reads at full speed
SERIAL = 0.4  # us of a split that waits for the one before it
PROGRAM = 0.1e6  # bytes per us that one program reads out of L2
ATTENTION = 0.6  # share of COPY
CONTEXT, BYTES = 1024, 2
BATCHES = (1, 8, 64, 256)
_STEP, _COLUMNS = 64, 128  # of a product, see plain_linear.py


class Shape(NamedTuple):
    """Of a dense model."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 128256

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of qkv, o, gate and up, down."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.heads * self.head_dim
        sizes = (qkv, self.hidden), (self.hidden, attention)
        return (*sizes, (2 * self.inner, self.hidden), (self.hidden, self.inner))

    @property
    def layer_bytes(self) -> int:
        """Of weights."""
        return sum(n * k for n, k in self.products) * BYTES

    @property
    def head_bytes(self) -> int:
        """Of the output head."""
        return self.vocab * self.hidden * BYTES

    def kv_bytes(self, batch: int) -> int:
        """Of one layer's keys and values."""
        return batch * CONTEXT * 2 * self.kv_heads * self.head_dim * BYTES


SHAPES = (
    Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64),
    Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128),
)


def roofline(shape: Shape, batch: int) -> float:
    """Microseconds of a step that reads everything once, at the bandwidth of the data sheet."""
    by_layer = shape.layer_bytes + shape.kv_bytes(batch)
    return (shape.layers * by_layer + shape.head_bytes) / PAPER


def expected(shape: Shape, batch: int, counts: dict[str, Any]) -> float:
    """Microseconds of a step."""
    of_layer: dict[str, int] = counts["of_layer"]
    launches, products = sum(of_layer.values()), of_layer["_plain_linear_kernel"]
    serial = "_sum_splits_kernel" in of_layer
    layer = (shape.layer_bytes + shape.kv_bytes(batch) / ATTENTION) / COPY
    layer += launches * GAP + products * RAMP + (launches - products) * SMALL
    for i, (n, k) in enumerate(shape.products):
        splits = _splits(n, k)
        layer += 2 * splits * batch * n * 4 / COPY
        if serial:
            layer += splits * SERIAL
        else:  # behind o and down a program has a whole row, elsewhere a part of it
            layer += splits * 4 * (n if i % 2 else 512) / PROGRAM
    around = counts["step"] * (GAP + SMALL) + RAMP + shape.head_bytes / COPY
    return shape.layers * layer + float(around)


def _splits(n: int, k: int) -> int:
    steps = -(-k // _STEP)
    return -(-steps // steps_per_split(steps, n, _COLUMNS))


def main(files: list[str]) -> None:
    """Print the table."""
    lines = ["| | | " + " | ".join(f"B={batch}" for batch in BATCHES) + " |"]
    lines.append("|---" * (2 + len(BATCHES)) + "|")
    for shape in SHAPES:
        floor = [roofline(shape, batch) for batch in BATCHES]
        cells = " | ".join(f"{us / 1000:.2f}" for us in floor)
        lines.append(f"| {shape.name} | roofline | {cells} |")
        for file in files:
            found = json.loads(Path(file).read_text())["launches"]
            dense = {of["batch"]: of for of in found if of["kind"] == "dense"}
            times = [expected(shape, batch, dense[batch]) for batch in BATCHES]
            shares = zip(times, floor, strict=True)
            cells = " | ".join(f"{us / 1000:.2f} ({least / us:.0%})" for us, least in shares)
            lines.append(f"| | {Path(file).stem} | {cells} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
