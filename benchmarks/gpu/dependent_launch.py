"""Does programmatic dependent launch change a bit, and what does it gain? JSON lines.

    PYTHONPATH=proto:common:kernels:worker_svc:benchmarks python -m gpu.dependent_launch \
        --model FOLDER [--batch 1 8 64 256] [--context 1024] [--ops NAME...] [--out FILE]

First the ops of gpu/cases.py, the first case of each: what it returns and what it was given, when
its kernels are launched one after another as ever and when each starts while the one before it
ends, in CUDA graphs of several launches, where they do overlap. A tensor that is not the same in
two runs without it, as one of addresses, says nothing: how many are is told beside.

Then decode steps as in gpu/decode.py, over contexts of the same random keys and values: the digest
of each step, which covers the bits of all its hidden states, and the time of a step. Exit status 1
where bits differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import machine
import torch
from surestep_kernels.columns.gpu.dependent_launch import use_dependent_launches
from torch import Tensor

from gpu.cases import MODELS, OPS, TINY, Case
from gpu.decode import Bench, copy_bandwidth, parser_of_bench

_LAUNCHES = 8  # of an op in a graph


def main(argv: Sequence[str] | None = None) -> int:
    """Compare ops, then steps; 1 if bits differ."""
    args = _parse(argv)
    about = machine.describe() | machine.accelerator(args.device)
    lines = list[dict[str, Any]]()
    for line in chain(_ops(args), _steps(args)):
        print(json.dumps(line), flush=True)
        lines.append(line)
        machine.write(args.out, about, dependent_launch=lines)  # as far as it has come
    return int(not all(line["equal"] for line in lines))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of_bench(__doc__, batch=[1, 8, 64, 256], window=4)
    parser.add_argument("--ops", nargs="*", help="names in gpu.cases.OPS; all by default")
    return parser.parse_args(argv)


def _ops(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.ops or OPS:
        models = MODELS if args.device == "cuda" else (TINY,)
        case = next(case for sizes in models for case in OPS[name](sizes))
        yield {"op": case.op, "shape": case.shape} | _compare(case, args.device)


def _compare(case: Case, device: str) -> dict[str, Any]:
    """Return whether tensors that are alike in two ordinary runs are so in the other one."""
    once, again, dependent = (_bits(case, device, wanted=wanted) for wanted in (False, False, True))
    both = [pair[::2] for pair in zip(once, again, dependent, strict=True) if pair[0] == pair[1]]
    equal = all(ordinary == other for ordinary, other in both)
    return {"tensors": len(once), "repeatable": len(both), "equal": equal}


def _bits(case: Case, device: str, *, wanted: bool) -> list[bytes]:
    """Return the bits of all that an op was given and has returned, from the same random inputs."""
    torch.manual_seed(0)
    work = case.make(device)
    use_dependent_launches(enabled=wanted)
    made = _captured(work.run) if device == "cuda" else work.run()
    return [_digest(tensor) for tensor in _tensors((work.run, made))]


def _captured(run: Callable[[], object]) -> object:
    """Return the result of the last of several launches that follow each other in a graph."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [run() for _ in range(_LAUNCHES)]
    graph.replay()
    torch.cuda.synchronize()
    return made


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, partial):
        yield from _tensors((tree.args, tuple(tree.keywords.values())))
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(tree):
        yield from _tensors([getattr(tree, field.name) for field in dataclasses.fields(tree)])


def _digest(tensor: Tensor) -> bytes:
    elements = tensor.contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(elements.numpy().data).digest()


def _steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    copy_gb_s = copy_bandwidth(args.device) / 1e9
    ordinary = list(_decode(args, copy_gb_s, wanted=False))
    gc.collect()  # frees its caches
    for one, other in zip(ordinary, _decode(args, copy_gb_s, wanted=True), strict=True):
        equal = one.pop("digests") == other["digests"]
        yield one | {"dependent_step_ms": other.get("step_ms"), "equal": equal}


def _decode(
    args: argparse.Namespace, copy_gb_s: float, *, wanted: bool
) -> Iterator[dict[str, Any]]:
    """Figures of each kind of step, and the digests of such steps once they are captured."""
    args.programmatic_dependent_launch = wanted
    bench = Bench(args)
    torch.manual_seed(0)
    for layer in bench.built.runner.context.caches.kv.layers:
        for pages in layer.pages:
            pages.normal_()
    for batch in args.batch:
        for width in sorted({1, args.window or 1}):
            figures = bench.figures(batch, width, 1, copy_gb_s)
            steps = () if "skipped" in figures else bench.steps(batch, width, 1)
            yield figures | {"digests": [step.digest for step in steps]}


if __name__ == "__main__":
    sys.exit(main())
