"""Does the device ever wait for the host? A profiler trace of decode steps, and what it says.

    PYTHONPATH=proto:common:kernels:worker_svc:benchmarks python -m gpu.trace --model FOLDER \
        [--batch 8] [--depth 1] [--steps 12] [--trace FILE.json.gz] [--out FILE]

Steps run as in gpu/decode.py. The trace, for chrome://tracing or Perfetto, is that of
torch.profiler. The table tells, of the recorded steps but the first: the share of wall time in
which nothing ran on the device, the longest such gap, and how often the host waited for the whole
device or stream, or copied while it waited. Such a wait inside a step is a fault: exit status 1,
as is memory that is allocated there or code that is loaded, each of which may make the host wait.
Waiting for the event behind a step's results is not one; it is counted apart. Behind the table
stand the kernels on which most time was spent, with how often they ran and microseconds in all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import machine
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.decode import WARM_STEPS, Bench, parser_of_bench

STEP = "decode step"  # as the trace calls what is recorded of one
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_OF_HOST = {"cuda_runtime", "cuda_driver"}
_SYNCS = {
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize"),
    *("cuCtxSynchronize", "cudaMemcpy", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
}
_ALLOCATIONS = {
    *("cudaMalloc", "cudaMallocAsync", "cudaHostAlloc", "cudaMallocHost", "cudaFree"),
    *("cudaFreeHost", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemCreate"),
}
_LOADS = {"cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData"}
_MOST_KERNELS = 15
_EVENT_WAITS = {"cudaEventSynchronize", "cuEventSynchronize"}


class Span(NamedTuple):
    """Microseconds on the clock of the trace."""

    begin: float
    end: float


class Figures(NamedTuple):
    """Figures of the recorded steps."""

    steps: int
    step_us: float  # mean
    device_activities: int
    device_idle_percent: float
    longest_gap_us: float
    host_syncs: int
    event_waits: int  # for results
    allocations: int  # of memory, on the device or pinned
    module_loads: int


def main(argv: Sequence[str] | None = None) -> int:
    """Record, write the trace, print the table; 1 if the host waited within a step."""
    args = _parse(argv)
    bench = Bench(args)
    about = machine.describe() | machine.accelerator(args.device)
    events = record(bench, args)
    figures = analyse(events)
    line = {"batch": args.batch[0], "depth": args.depth} | figures._asdict()
    print(json.dumps(about | line))
    for name, value in line.items():
        print(f"{name:>20}  {value:.1f}" if isinstance(value, float) else f"{name:>20}  {value}")
    kernels = longest_kernels(events)
    for name, launches, spent in kernels:
        print(f"{spent:>12.1f} us  {launches:>6}  {name}")
    machine.write(args.out, about, trace=line, kernels=kernels)
    return int(figures.host_syncs + figures.allocations + figures.module_loads > 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of_bench(__doc__, batch=[8], window=0)
    parser.add_argument("--depth", type=int, default=1, help="steps under way beside the newest")
    parser.add_argument("--steps", type=int, default=12, help="how many are recorded")
    parser.add_argument("--trace", type=Path, help="where the Chrome trace goes, compressed")
    return parser.parse_args(argv)


def record(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Events of the Chrome trace of some steps, taken when all is compiled and warm."""
    steps = bench.steps(args.batch[0], args.window or 1, args.depth)
    for _ in islice(steps, WARM_STEPS):
        pass
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if args.device == "cuda" else []
    with profile(activities=activities) as profiler:
        for _ in range(args.steps):
            with record_function(STEP):
                next(steps)
    for _ in steps:
        pass
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = path.read_bytes()
    if args.trace is not None:
        args.trace.write_bytes(gzip.compress(trace))
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    return events


def analyse(events: Iterable[dict[str, Any]]) -> Figures:
    """Figures of the events of a Chrome trace, from the second recorded step on.

    The first has the profiler's own start in it. Raises ValueError with fewer than two steps.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    steps = sorted(
        _span(event)
        for event in timed
        if event["name"] == STEP and event.get("cat") == "user_annotation"
    )[1:]
    if not steps:
        raise ValueError("the trace has fewer than two steps")
    window = Span(steps[0].begin, steps[-1].end)
    busy = [_span(event) for event in timed if event.get("cat") in _ON_DEVICE]
    calls = [
        event["name"]
        for event in timed
        if event.get("cat") in _OF_HOST and any(s.begin <= event["ts"] < s.end for s in steps)
    ]
    between = gaps(busy, window)
    wall = window.end - window.begin
    return Figures(
        steps=len(steps),
        step_us=wall / len(steps),
        device_activities=sum(s.end > window.begin and s.begin < window.end for s in busy),
        device_idle_percent=100 * sum(gap.end - gap.begin for gap in between) / wall,
        longest_gap_us=max((gap.end - gap.begin for gap in between), default=0.0),
        host_syncs=sum(name in _SYNCS for name in calls),
        event_waits=sum(name in _EVENT_WAITS for name in calls),
        allocations=sum(name in _ALLOCATIONS for name in calls),
        module_loads=sum(name in _LOADS for name in calls),
    )


def longest_kernels(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Name, launches and microseconds in all of those on which most time was spent."""
    spent = dict[str, list[float]]()
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            spent.setdefault(event["name"], []).append(event["dur"])
    lines = [(name, len(times), round(sum(times), 1)) for name, times in spent.items()]
    return sorted(lines, key=lambda line: -line[2])[:_MOST_KERNELS]


def gaps(busy: Iterable[Span], window: Span) -> list[Span]:
    """Parts of the window that no busy span covers, in order; spans may overlap."""
    free, at = list[Span](), window.begin
    for span in sorted(busy):
        if span.begin >= window.end:
            break
        if span.begin > at:
            free.append(Span(at, span.begin))
        at = max(at, span.end)
    if at < window.end:
        free.append(Span(at, window.end))
    return free


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


if __name__ == "__main__":
    sys.exit(main())
