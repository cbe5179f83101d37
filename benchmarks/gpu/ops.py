"""Speed of the Triton kernels on a CUDA device; one JSON line per op and shape, then a table.

    PYTHONPATH=common:kernels:benchmarks python -m gpu.ops [--ops linear ngram] [--out FILE]
    PYTHONPATH=common:kernels:benchmarks python -m gpu.ops --once     # under a profiler
    PYTHONPATH=common:kernels:benchmarks python -m gpu.ops --smoke

A time is that of one launch within a CUDA graph of many, on buffers that take turns; the median of
several replays. The bytes are those that an op has to move, whatever it does move, and their rate
is compared with a copy of a large tensor, timed in the same run. Weights and tables are read cold:
there are more of them than L2 holds. Activations lie in L2, as they do in serving, so that small
ones can be faster than the copy. --smoke runs each op once at tiny sizes, without a device, in
Triton's interpreter; --once runs each once on the device and times nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import torch

if TYPE_CHECKING:
    from gpu.cases import Case, Work

_LAUNCHES, _REPLAYS = 200, 5
_GRAPH_US = 3000  # that all launches of a graph are to take together, if 3 of them can
_WARM_BUFFERS = 4  # of ops that are not cold
_COPY_BYTES = 1 << 30
_COLUMNS = ("model", "op", "shape", "us", "gb_s", "copy_percent", "tflop_s")


def main(argv: Sequence[str] | None = None) -> None:
    """Time everything, or what --ops names."""
    args, lines = _parse(argv), list[dict[str, Any]]()
    if args.smoke or args.once:
        if args.smoke:
            os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined: before imports
        for model, case in _cases(args.ops, smoke=args.smoke):
            figures = _once(case, "cpu" if args.smoke else "cuda")
            lines.append({"model": model, "op": case.op, "shape": case.shape} | figures)
            _print(lines[-1])
            machine.write(args.out, machine.describe(), ops=lines)
        return
    if args.without_workspace:
        from surestep_common.config import without_cublas_workspace

        os.environ |= without_cublas_workspace()  # read when cuBLAS is first used
    about = machine.describe() | _device() | {"cublas_workspace": not args.without_workspace}
    _print(about)
    for model, case in _cases(args.ops, smoke=False):
        figures = _measure(case, about["copy_gb_s"])
        lines.append({"model": model, "op": case.op, "shape": case.shape} | figures)
        _print(lines[-1])
        machine.write(args.out, about, ops=lines)  # as far as it has come
    print(_table(lines))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ops", nargs="*", help="names in gpu.cases.OPS; all by default")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    text = "cuBLAS (linear_torch) gets none, as beside --linear-backend auto"
    parser.add_argument("--without-workspace", action="store_true", help=text)
    parser.add_argument("--once", action="store_true", help="run each op once, and time nothing")
    parser.add_argument("--smoke", action="store_true", help="the same, tiny, on the CPU")
    return parser.parse_args(argv)


def _cases(ops: Sequence[str] | None, *, smoke: bool) -> Iterator[tuple[str, Case]]:
    """Cases, each with the name of its model."""
    from gpu.cases import MODELS, OPS, TINY

    for sizes in (TINY,) if smoke else MODELS:
        for name in ops or OPS:
            yield from ((sizes.name, case) for case in OPS[name](sizes))


def _once(case: Case, device: str) -> dict[str, Any]:
    work = case.make(device)
    work.run()
    return {"bytes": work.nbytes}


def _measure(case: Case, copy_gb_s: float) -> dict[str, Any]:
    """Figures of a case."""
    works = list(_works(case))
    us = _us_per_launch([work.run for work in works])
    nbytes, flop = works[0].nbytes, works[0].flop
    rate = nbytes / us * 1e-3
    figures = {"us": round(us, 2), "bytes": nbytes, "gb_s": round(rate, 1)}
    figures["copy_percent"] = round(100 * rate / copy_gb_s, 1)
    return figures | ({"tflop_s": round(flop / us * 1e-6, 2)} if flop else {})


def _works(case: Case) -> Iterator[Work]:
    """Yield enough buffers to make a cold case cold."""
    first = case.make("cuda")
    yield first
    beyond = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    count = min(_LAUNCHES, -(-beyond // first.nbytes)) if case.cold else _WARM_BUFFERS
    yield from (case.make("cuda") for _ in range(count - 1))


def _us_per_launch(runs: Sequence[Callable[[], object]]) -> float:
    """Median over replays of a graph."""
    for run in runs:
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = max(_launches(min(_us(runs[0]) for _ in range(3))), len(runs))
    with torch.cuda.graph(graph):
        for run in islice(cycle(runs), launches):
            run()
    graph.replay()
    return statistics.median(_us(graph.replay) for _ in range(_REPLAYS)) / launches


def _launches(us: float) -> int:
    """Return how many launches time allows; a single one takes some microseconds more."""
    return int(min(max(_GRAPH_US / us, 3), _LAUNCHES))


def _us(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    ms: float = begin.elapsed_time(end)
    return ms * 1e3


def _device() -> dict[str, Any]:
    """The card, what drives it, and how fast it copies."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "copy_gb_s": round(_copy_gb_s(), 1),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def _copy_gb_s() -> float:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    us = statistics.median(_us(lambda: target.copy_(source)) for _ in range(_REPLAYS))
    return 2 * _COPY_BYTES / us * 1e-3


def _table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [_COLUMNS, *([str(line.get(name, "")) for name in _COLUMNS] for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
