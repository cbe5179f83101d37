"""Speed of the CPU kernels at the shapes of the default model; one JSON line per op and shape.

    PYTHONPATH=common:kernels python benchmarks/kernels.py [--threads 2] [--reference] [--ops step]

The `step` lines are a whole model step (30 layers in that weight format, logits in bf16) of M rows,
one per sequence, with 256 positions of context each; the `layers` lines are the products of all
layers alone, of two models and for one row. Times are the best of several runs: the
machine is shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight, load_kernels
from surestep_kernels.linear import MXFP4_GROUP, WeightFormat
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))  # N, K
QWEN3_SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # of 0.6B
BLOCK_SIZE, CONTEXT, DTYPE = 16, 256, torch.bfloat16
FORMATS = (
    *("bf16", "fp8", "int4", "mxfp4", "nvfp4"),
    *("affine4", "affine4_f32", "affine8", "affine8_f32"),
)
NVFP4_GROUP = 16
AFFINE_GROUP = 32  # of most block types of GGUF
BYTES = {  # of an element, of the header of a group
    WeightFormat.BF16: (2, 0),
    WeightFormat.FP8: (1, 4),
    WeightFormat.INT4: (0.5, 4),
    WeightFormat.MXFP4: (0.5, 1),
    WeightFormat.NVFP4: (0.5, 4),
    WeightFormat.AFFINE4: (0.5, 4),
    WeightFormat.AFFINE8: (1, 4),
    WeightFormat.AFFINE4_F32: (0.5, 8),
    WeightFormat.AFFINE8_F32: (1, 8),
}


class Case(NamedTuple):
    op: str
    shape: str
    run: Callable[[], object]
    megabytes: float = 0.0  # read from memory at least
    mflop: float = 0.0


class Sequences(NamedTuple):
    """Paged caches of some sequences, and the batch of their newest tokens."""

    cache: LayerCache
    rows: AttentionRows
    positions: Tensor
    slots: Tensor

    def attend(self, kernels: KernelSet, q: Tensor) -> Tensor:
        return kernels.paged_attention(q, self.cache, self.rows, HEAD_DIM**-0.5)


def make_sequences(kernels: KernelSet, rows: int, tokens: int, context: int) -> Sequences:
    pages = context // BLOCK_SIZE
    shape = kernels.kv_cache_shape(rows * pages + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    tables = (torch.arange(rows * pages, dtype=torch.int32) + 1).view(rows, pages)
    bounds = torch.arange(rows + 1, dtype=torch.int32) * tokens
    start = torch.full((rows,), context - tokens, dtype=torch.int32)
    positions = torch.full((rows * tokens,), context - 1)
    slots = tables[:, -1].long().repeat_interleave(tokens) * BLOCK_SIZE + BLOCK_SIZE - 1
    batch = AttentionRows(tables, torch.arange(rows), bounds, start, tokens)
    return Sequences(LayerCache(rand(*shape), rand(*shape)), batch, positions, slots)


def rand(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.05).to(DTYPE)


def pack(kernels: KernelSet, format_: str, n: int, k: int) -> PackedLinear:
    """A random weight [n, k] in one of FORMATS."""
    if format_ == "bf16":
        return kernels.pack_linear(rand(n, k))
    if format_ == "mxfp4":
        codes = torch.randint(16, (n, k), dtype=torch.uint8)
        exponents = torch.randint(115, 125, (n, k // MXFP4_GROUP), dtype=torch.uint8)
        return kernels.pack_quantized(QuantizedWeight(codes, exponents, None, MXFP4_GROUP))
    if format_ == "nvfp4":
        codes = torch.randint(16, (n, k), dtype=torch.uint8)
        scales = torch.rand(n, k // NVFP4_GROUP) * 0.05
        return kernels.pack_quantized(QuantizedWeight(codes, scales, None, NVFP4_GROUP))
    if format_.startswith("affine"):
        return kernels.pack_quantized(affine(format_, n, k))
    group = 128 if k % 128 == 0 else 64
    scales = (torch.rand(n, k // group) * 0.05).half().float()
    if format_ == "fp8":
        codes = (torch.randn(n, k) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return kernels.pack_quantized(QuantizedWeight(codes, scales, None, group))
    codes, zeros = (torch.randint(16, (n, i), dtype=torch.uint8) for i in (k, k // group))
    return kernels.pack_quantized(QuantizedWeight(codes, scales, zeros, group))


def affine(format_: str, n: int, k: int) -> QuantizedWeight:
    """A random affine weight, whose scales and mins have as many bits as the format needs."""
    bits = 4 if format_.startswith("affine4") else 8
    scales, mins = (torch.rand(n, k // AFFINE_GROUP) * 0.05 for _ in "sm")
    if not format_.endswith("f32"):
        scales, mins = scales.half().float(), mins.half().float()
    codes = torch.randint(1 << bits, (n, k), dtype=torch.uint8)
    return QuantizedWeight(codes, scales, None, AFFINE_GROUP, -mins, bits)


def read_megabytes(packed: PackedLinear) -> float:
    """Without the padding of the layout."""
    element, header = BYTES[packed.format]
    headers = 0 if packed.group_size == 0 else header / packed.group_size
    return packed.in_features * packed.out_features * (element + headers) * 1e-6


def linear_cases(kernels: KernelSet) -> Iterator[Case]:
    for (n, k), format_ in product((*SHAPES, (VOCAB, HIDDEN)), FORMATS):
        packed = [pack(kernels, format_, n, k) for _ in range(-(-40_000 // n))]
        weights, megabytes = cycle(packed), read_megabytes(packed[0])
        for m in (1, 2, 3, 4, 5, 8, 32, 64, 256):
            x = rand(m, k)
            run = lambda x=x, w=weights: kernels.linear(x, next(w))  # noqa: E731
            yield Case(f"linear {format_}", f"M={m} N={n} K={k}", run, megabytes, 2e-6 * m * n * k)


def layers_cases(kernels: KernelSet) -> Iterator[Case]:
    """The products of all layers of a model for one token: as fast as its weights are read."""
    models = (("default", SHAPES, LAYERS), ("Qwen3-0.6B", QWEN3_SHAPES, 28))
    for (name, shapes, num_layers), format_ in product(models, ("bf16", "affine4")):
        weights = [pack(kernels, format_, n, k) for _ in range(num_layers) for n, k in shapes]
        x = {k: rand(1, k) for _, k in shapes}

        def run(x: dict[int, Tensor] = x, weights: list[PackedLinear] = weights) -> None:
            for packed in weights:
                kernels.linear(x[packed.in_features], packed)

        yield Case(f"layers {format_}", f"M=1 {name}", run, sum(map(read_megabytes, weights)))


def row_cases(kernels: KernelSet) -> Iterator[Case]:
    table, weight = torch.randn(4096, HEAD_DIM), rand(HIDDEN).float()
    for m in (1, 32, 256):
        x, q, k, at = rand(m, HIDDEN), rand(m, HEADS, HEAD_DIM), rand(m, KV_HEADS, HEAD_DIM), m
        add = partial(kernels.add_rms_norm, x, rand(m, HIDDEN), weight, 1e-5)
        yield Case("add_rms_norm", f"M={m}", add)
        yield Case("silu_and_mul", f"M={m}", partial(kernels.silu_and_mul, rand(m, 2 * INNER)))
        yield Case("rotary", f"M={m}", partial(kernels.rotary, q, k, torch.arange(at), table))


def attention_cases(kernels: KernelSet) -> Iterator[Case]:
    for rows, tokens, context in ((1, 1, 256), (1, 5, 1024), (32, 1, 256), (1, 256, 1024)):
        s = make_sequences(kernels, rows, tokens, context)
        elements = rows * context * KV_HEADS * HEAD_DIM
        mflop = 4e-6 * elements * tokens * HEADS / KV_HEADS
        run = partial(s.attend, kernels, rand(rows * tokens, HEADS, HEAD_DIM))
        yield Case("attention", f"R={rows} q={tokens} L={context}", run, elements * 4e-6, mflop)


def step_cases(kernels: KernelSet) -> Iterator[Case]:
    for format_ in FORMATS:
        yield from model_step_cases(kernels, format_)


def model_step_cases(kernels: KernelSet, format_: str) -> Iterator[Case]:
    layers = [[pack(kernels, format_, n, k) for n, k in SHAPES] for _ in range(LAYERS)]
    head, norm = kernels.pack_linear(rand(VOCAB, HIDDEN)), rand(HIDDEN).float()
    table = torch.randn(4096, HEAD_DIM)
    megabytes = sum(read_megabytes(w) for layer in layers for w in layer) + read_megabytes(head)
    mflop = (sum(n * k for n, k in SHAPES) * LAYERS + VOCAB * HIDDEN) * 2e-6

    def step(x: Tensor, s: Sequences) -> Tensor:
        residual = torch.zeros_like(x)
        for qkv, out, gate_up, down in layers:
            x = kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), qkv)
            q, k, v = x.view(len(x), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            kernels.rotary(q, k, s.positions, table)
            kernels.store_kv(k, v, s.cache, s.slots)
            x = kernels.linear(s.attend(kernels, q).view(len(x), -1), out)
            x = kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), gate_up)
            x = kernels.linear(kernels.silu_and_mul(x), down)
        return kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-5), head, torch.float32)

    for m in (1, 5, 8, 32):
        run = partial(step, rand(m, HIDDEN), make_sequences(kernels, m, 1, CONTEXT))
        yield Case(f"step {format_}", f"M={m}", run, megabytes, m * mflop)


CASES = {
    "row": row_cases,
    "linear": linear_cases,
    "layers": layers_cases,
    "attention": attention_cases,
    "step": step_cases,
}


def best_seconds(run: Callable[[], object], budget: float = 0.5) -> float:
    """Shortest of as many runs as fit the budget, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--reference", action="store_true", help="the torch references")
    parser.add_argument("--ops", nargs="*", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    kernels = load_kernels("cpu", cpu_kernels="reference" if args.reference else "auto")
    kernels.set_num_threads(args.threads)
    about = {"kernels": kernels.name, "threads": args.threads}
    for case in (case for name in args.ops for case in CASES[name](kernels)):
        seconds = best_seconds(case.run)
        rates = {"gb_s": case.megabytes / seconds / 1e3, "gflop_s": case.mflop / seconds / 1e3}
        rounded = {name: round(rate, 1) for name, rate in rates.items() if rate}
        line = {
            "op": case.op,
            "shape": case.shape,
            **about,
            "us": round(seconds * 1e6, 1),
            **rounded,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
