"""Measure the host's cost of a step on a device before its first kernel; JSON lines, no device.

    PYTHONPATH=proto:common:kernels:worker_svc:benchmarks python -m gpu.host [--rows 1 8 64 256] \
        [--prompt 200] [--out FILE]

Columns of a step are made, and sent in two ways: as tensors of their own, which a step needs that
is launched kernel by kernel, and to the fixed addresses of a captured step. On a CPU the copies are
of its own memory, so that what is timed is the work around them. --prompt adds the end of a prompt
of so many tokens to each step. launches_saved counts kernels, of Llama-3.2-1B by default, that a
captured step does not launch one by one; what a launch takes is a figure of yours, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from surestep_kernels.step_columns import HostColumn
from surestep_proto import worker_pb2 as pb
from surestep_worker.step.batch import Extras, Geometry, StepColumns
from surestep_worker.step.buckets import (
    StepSize,
    find_bucket,
    in_order,
    make_buckets,
    padding,
    step_size,
)
from surestep_worker.step.plan import NO_SNAPSHOTS, Rows
from surestep_worker.step.sampling import SamplingTable
from surestep_worker.step.slots import Slots
from surestep_worker.step.transfer import InputBuffer, Layout, upload

_REPEATS = 300
CPU = torch.device("cpu")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of rows."""
    args = _parse(argv)
    about = machine.describe()
    print(json.dumps(about))
    lines = list[dict[str, Any]]()
    for line in figures(args):
        print(json.dumps(line), flush=True)
        lines.append(line)
    machine.write(args.out, about, host=lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt among the rows")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--launches-per-layer", type=int, default=15)
    parser.add_argument("--launches-besides", type=int, default=17)
    parser.add_argument("--launch-us", type=float, default=12.0, help="host time of a launch")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    return parser.parse_args(argv)


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Microseconds of making columns, and of sending them in both ways."""
    launches = args.layers * args.launches_per_layer + args.launches_besides
    for count in args.rows:
        slots = Slots(count + 1, max_model_len=4096, max_draft_tokens=0, block_size=16)
        table, rows = SamplingTable(slots.num_slots, 128256), _rows(count, args.prompt)
        columns, geometry = make(rows, slots, table)
        bucket = _bucket(columns, geometry, slots.num_slots)
        line: dict[str, Any] = {"rows": count, "prompt": args.prompt}
        line["columns_us"] = timed(partial(make, rows, slots, table))
        line["tensors_us"] = timed(partial(upload, columns, CPU))
        if bucket is not None:
            empty = padding(bucket, slots.num_slots, has_draft_head=False)
            input_buffer = InputBuffer([empty], CPU)
            layout = Layout(empty, input_buffer.words)
            line["in_place_us"] = timed(partial(input_buffer.send, layout, columns, Extras()))
            line |= {"bucket": bucket._asdict(), "launches_saved": launches}
            line["launches_us"] = launches * args.launch_us
        yield line


def make(
    rows: Rows, slots: Slots, table: SamplingTable
) -> tuple[StepColumns[HostColumn], Geometry]:
    """Arrays of a step."""
    wants = np.zeros(slots.num_slots, dtype=np.bool_)
    geometry = Geometry.of(rows, slots, wants, NO_SNAPSHOTS)
    return StepColumns.of(geometry, table, rows.max_drafts), geometry


def _bucket(
    columns: StepColumns[HostColumn], geometry: Geometry, num_slots: int
) -> StepSize | None:
    size = step_size(columns, geometry)
    return (
        find_bucket(size, in_order(make_buckets(num_slots, 1, 8192))) if size is not None else None
    )


def _rows(count: int, prompt: int) -> Rows:
    total = count + (prompt > 0)
    told = {
        "slot": np.arange(total),
        "mode": np.where(np.arange(total) < count, pb.DECODE, pb.PREFILL_LAST),
        "num_tokens": np.where(np.arange(total) < count, 0, prompt),
    }
    nothing = np.zeros(total, dtype=np.int64)
    return Rows(**{name: told.get(name, nothing) for name, _ in Rows.none().columns()})


def timed(work: Callable[[], object]) -> float:
    """Median microseconds."""
    samples = list[int]()
    for _ in range(_REPEATS):
        began = time.perf_counter_ns()
        work()
        samples.append(time.perf_counter_ns() - began)
    return round(statistics.median(samples) / 1000, 1)


if __name__ == "__main__":
    main()
