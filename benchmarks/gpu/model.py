r"""Model the time of a decode step on an H200 from bytes and launches; Markdown.

    PYTHONPATH=proto:common:kernels:worker_svc:tools:benchmarks python -m gpu.model COUNTS... \
        [--out FILE]

Nothing is measured: COUNTS are results of gpu/launches.py, each of which becomes a line per model,
and the constants below are assumptions. Every launch waits for the one before it. A product reads
its weight and writes its splits, which the next launch reads back: a sum that takes one split after
another waits for each, one that has all of them under way waits for the program that reads most.

Counts of which the last is of today have one more line: with programmatic dependent launch. By the
CUDA Programming Guide a kernel is launched then while the one before it runs, so that the latency
of its launch is hidden. It gives no figures: what is left of a gap here, until the end of the one
is seen by the other, is assumed. Nothing else is hidden, as kernels do nothing before they have
waited, nor is any gap beside a launch of torch, which takes no part in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
from surestep_kernels.linear.splits import steps_per_split

PAPER, COPY = 4.8e6, 4.3e6  # bytes per us: of the data sheet, and as a copy is known to reach
GAP = 1.2  # us between launches that depend on each other
DEPENDENT_GAP = 0.5  # the same where the later one has been launched before
SMALL = 1.8  # us of a launch with next to nothing to do
RAMP = 2.2  # us until a product reads at full speed
SERIAL = 0.4  # us of a split that waits for the one before it
PROGRAM = 0.1e6  # bytes per us that one program reads out of L2
ATTENTION = 0.6  # share of COPY
CONTEXT, BYTES = 1024, 2
BATCHES = (1, 8, 64, 256)
_STEP, _COLUMNS = 64, 128  # of a product, see linear/plain.py


class Shape(NamedTuple):
    """Sizes of a dense model."""

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
        """Bytes of a layer's weights."""
        return sum(n * k for n, k in self.products) * BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head's weights."""
        return self.vocab * self.hidden * BYTES

    def kv_bytes(self, batch: int) -> int:
        """Return bytes of a layer's keys and values."""
        return batch * CONTEXT * 2 * self.kv_heads * self.head_dim * BYTES


SHAPES = (
    Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64),
    Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128),
)


def roofline(shape: Shape, batch: int) -> float:
    """Microseconds of a step that reads everything once, at the bandwidth of the data sheet."""
    by_layer = shape.layer_bytes + shape.kv_bytes(batch)
    return (shape.layers * by_layer + shape.head_bytes) / PAPER


def expected(shape: Shape, batch: int, counts: dict[str, Any], *, dependent: bool = False) -> float:
    """Microseconds of a step."""
    of_layer: dict[str, int] = counts["of_layer"]
    launches, products = sum(of_layer.values()), of_layer["_plain_linear_kernel"]
    serial = "_sum_splits_kernel" in of_layer
    layer = (shape.layer_bytes + shape.kv_bytes(batch) / ATTENTION) / COPY
    layer += _gaps(of_layer, dependent=dependent) + products * RAMP + (launches - products) * SMALL
    for i, (n, k) in enumerate(shape.products):
        splits = _splits(n, k)
        layer += 2 * splits * batch * n * 4 / COPY
        if serial:
            layer += splits * SERIAL
        else:  # behind o and down a program has a whole row, elsewhere a part of it
            layer += splits * 4 * (n if i % 2 else 512) / PROGRAM
    around = _gaps(counts["of_step"], dependent=dependent) + counts["step"] * SMALL
    around += RAMP + shape.head_bytes / COPY
    return shape.layers * layer + float(around)


def _gaps(launches: dict[str, int], *, dependent: bool) -> float:
    """Microseconds in front of all of them."""
    total = sum(launches.values())
    torch = sum(count for name, count in launches.items() if name.startswith("torch "))
    # One of torch's waits for the one before it, and is waited for by the one behind it.
    hidden = max(total - 2 * torch, 0) if dependent else 0
    return (total - hidden) * GAP + hidden * DEPENDENT_GAP


def _splits(n: int, k: int) -> int:
    steps = -(-k // _STEP)
    return -(-steps // steps_per_split(steps, n, _COLUMNS))


class Line(NamedTuple):
    """Line of the table: milliseconds by batch."""

    model: str
    launches: str
    ms: dict[int, float]


def lines(files: Sequence[Path]) -> Iterator[Line]:
    """For each shape the roofline, then each count, and the last one with dependent launches."""
    counts = {file.stem: _dense(file) for file in files}
    for shape in SHAPES:
        yield Line(shape.name, "roofline", {n: roofline(shape, n) / 1000 for n in BATCHES})
        for stem, found in counts.items():
            ms = {n: expected(shape, n, found[n]) / 1000 for n in BATCHES}
            yield Line(shape.name, stem, ms)
        ms = {n: expected(shape, n, found[n], dependent=True) / 1000 for n in BATCHES}
        yield Line(shape.name, f"{stem}, programmatic dependent launch", ms)


def _dense(file: Path) -> dict[int, dict[str, Any]]:
    found = json.loads(file.read_text())["launches"]
    return {of["batch"]: of for of in found if of["kind"] == "dense"}


def table(found: Sequence[Line]) -> str:
    """In Markdown, with the share of the roofline."""
    rows = ["| | | " + " | ".join(f"B={batch}" for batch in BATCHES) + " |"]
    rows.append("|---" * (2 + len(BATCHES)) + "|")
    for line in found:
        if line.launches == "roofline":
            floor, name = line.ms, line.model
            cells = [f"{ms:.2f}" for ms in line.ms.values()]
        else:
            name = ""
            cells = [f"{ms:.2f} ({floor[batch] / ms:.0%})" for batch, ms in line.ms.items()]
        rows.append(f"| {name} | {line.launches} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("counts", type=Path, nargs="+", help="results of gpu/launches.py")
    parser.add_argument("--out", type=Path, help="also write the table to this file, as JSON")
    args = parser.parse_args(argv)
    found = list(lines(args.counts))
    sys.stdout.write(table(found))
    assumed = {"gap_us": GAP, "dependent_gap_us": DEPENDENT_GAP, "copy_bytes_per_us": COPY}
    rounded = [line._replace(ms={n: round(ms, 3) for n, ms in line.ms.items()}) for line in found]
    about = {"modelled": "H200"}
    machine.write(args.out, about, assumed=assumed, lines=[line._asdict() for line in rounded])


if __name__ == "__main__":
    main()
