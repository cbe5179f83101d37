"""Speed of the CPU kernels at the shapes of the default model; one JSON line per op and shape.

    PYTHONPATH=common:kernels python benchmarks/kernels.py [--threads 2] [--reference] [--ops OP]

The `step` lines are a whole model step (30 layers and the logits) of M rows, one per sequence,
with 256 positions of context each. Times are the best of several runs: the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, load_kernels
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BLOCK_SIZE, CONTEXT, DTYPE = 16, 256, torch.bfloat16


class Case(NamedTuple):
    op: str
    shape: str
    run: Callable[[], object]
    megabytes: float  # read from memory at least
    mflop: float


def best_seconds(run: Callable[[], object], budget: float = 0.4) -> float:
    """Shortest of as many runs as fit the budget, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < 300):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DTYPE)


def linear_cases(kernels: KernelSet) -> Iterator[Case]:
    for n, k in ((QKV, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), (VOCAB, HIDDEN)):
        copies = [kernels.pack_linear(rand(n, k) * 0.05) for _ in range(max(1, 40 * QKV // n))]
        for m in (1, 5, 8, 32, 256):
            x, turn = rand(m, k), iter(range(10**9))
            yield Case(
                "linear",
                f"M={m} N={n} K={k}",
                lambda x=x, turn=turn, w=copies: kernels.linear(x, w[next(turn) % len(w)]),
                n * k * 2e-6,
                2e-6 * m * n * k,
            )


def row_cases(kernels: KernelSet) -> Iterator[Case]:
    table = torch.randn(4096, HEAD_DIM)
    for m in (1, 32, 256):
        x, y, w = rand(m, HIDDEN), rand(m, HIDDEN), rand(HIDDEN)
        yield Case(
            "add_rms_norm",
            f"M={m}",
            lambda x=x, y=y, w=w: kernels.add_rms_norm(x, y, w, 1e-5),
            0,
            0,
        )
        gates = rand(m, 2 * INNER)
        yield Case("silu_and_mul", f"M={m}", lambda x=gates: kernels.silu_and_mul(x), 0, 0)
        q, k, at = rand(m, HEADS, HEAD_DIM), rand(m, KV_HEADS, HEAD_DIM), torch.arange(m)
        yield Case(
            "rotary", f"M={m}", lambda q=q, k=k, at=at: kernels.rotary(q, k, at, table), 0, 0
        )


class Sequences:
    """Paged caches of M sequences with `tokens` query tokens each."""

    def __init__(self, kernels: KernelSet, rows: int, tokens: int, context: int) -> None:
        pages = -(-context // BLOCK_SIZE)
        shape = kernels.kv_cache_shape(rows * pages + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.kernels = kernels
        self.k_cache, self.v_cache = rand(*shape), rand(*shape)
        self.tables = (torch.arange(rows * pages, dtype=torch.int32) + 1).view(rows, pages)
        self.bounds = torch.arange(rows + 1, dtype=torch.int32) * tokens
        self.start = torch.full((rows,), context - tokens, dtype=torch.int32)
        self.slots = self.tables[:, -1].long().repeat_interleave(tokens) * BLOCK_SIZE
        self.positions = torch.full((rows * tokens,), context - 1)

    def attend(self, q: Tensor) -> Tensor:
        caches = self.k_cache, self.v_cache
        return self.kernels.paged_attention(
            q, *caches, self.tables, self.bounds, self.start, HEAD_DIM**-0.5
        )


def attention_cases(kernels: KernelSet) -> Iterator[Case]:
    for rows, tokens, context in ((1, 1, 256), (1, 5, 1024), (32, 1, 256), (1, 256, 1024)):
        sequences, q = (
            Sequences(kernels, rows, tokens, context),
            rand(rows * tokens, HEADS, HEAD_DIM),
        )
        elements = rows * context * KV_HEADS * HEAD_DIM
        mflop = 4e-6 * elements * tokens * HEADS / KV_HEADS
        shape = f"R={rows} q={tokens} L={context}"
        yield Case(
            "paged_attention", shape, lambda s=sequences, q=q: s.attend(q), elements * 4e-6, mflop
        )


def step_cases(kernels: KernelSet) -> Iterator[Case]:
    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    layers = [[kernels.pack_linear(rand(n, k) * 0.03) for n, k in shapes] for _ in range(LAYERS)]
    head, norm = kernels.pack_linear(rand(VOCAB, HIDDEN)), rand(HIDDEN)
    table = torch.randn(4096, HEAD_DIM)
    megabytes = (sum(n * k for n, k in shapes) * LAYERS + VOCAB * HIDDEN) * 2e-6

    def step(x: Tensor, s: Sequences) -> Tensor:
        residual = torch.zeros_like(x)
        for qkv, out, gate_up, down in layers:
            heads = kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), qkv).view(
                len(x), -1, HEAD_DIM
            )
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            kernels.rotary(q, k, s.positions, table)
            kernels.store_kv(k, v, s.k_cache, s.v_cache, s.slots)
            x = kernels.linear(s.attend(q).view(len(x), -1), out)
            x = kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), gate_up)
            x = kernels.linear(kernels.silu_and_mul(x), down)
        return kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), head, torch.float32)

    for m in (1, 5, 8, 32):
        s = Sequences(kernels, m, 1, CONTEXT)
        x = rand(m, HIDDEN)
        yield Case("step", f"M={m}", lambda x=x, s=s: step(x, s), megabytes, m * megabytes)


CASES = {"row": row_cases, "linear": linear_cases, "attention": attention_cases, "step": step_cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--reference", action="store_true", help="the torch references")
    parser.add_argument("--ops", nargs="*", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    kernels = load_kernels("cpu", cpu_kernels="reference" if args.reference else "auto")
    kernels.set_num_threads(args.threads)
    for case in (case for name in args.ops for case in CASES[name](kernels)):
        seconds = best_seconds(case.run)
        line = {
            "op": case.op,
            "shape": case.shape,
            "kernels": kernels.name,
            "threads": args.threads,
        }
        line |= {"us": round(seconds * 1e6, 1), "gb_s": round(case.megabytes / seconds / 1e3, 1)}
        print(json.dumps(line | {"gflop_s": round(case.mflop / seconds / 1e3, 1)}), flush=True)


if __name__ == "__main__":
    main()
