"""Cases that gpu/ops.py times: a function per op, which yields its cases at the sizes of a model.

An op comes in by a function, here or in a module beside this one, and its entry in OPS. It is the
device's own: whatever `load_triton()` holds. A model without such a layer yields no cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.add_adapters import AdapterWeights
from torch import Tensor

from gpu import cases_experts, cases_fused, cases_state, cases_step
from gpu.sizes import (
    BYTES,
    MODELS,
    TINY,
    TINY_GPT_OSS,
    Case,
    Sizes,
    Work,
    activations,
    floats,
    kernels,
)
from gpu.weights import PACK, Pack, weight_bytes

__all__ = ["MODELS", "OPS", "PACK", "TINY", "TINY_GPT_OSS", "Case", "Sizes", "Work"]


def rms_norm(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        x, weight = activations(device, m, s.hidden), floats(device, s.hidden)
        return Work(partial(kernels().rms_norm, x, weight, 1e-5), 2 * x.nbytes + weight.nbytes)

    for m in s.rows:
        yield Case("rms_norm", f"T={m} H={s.hidden}", partial(make, m=m))


def rms_norm_heads(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        qkv = activations(device, m, s.heads + 2 * s.kv_heads, s.head_dim)
        run = partial(kernels().rms_norm, qkv[:, : s.heads], floats(device, s.head_dim), 1e-6)
        return Work(run, 2 * m * s.heads * s.head_dim * BYTES + s.head_dim * 4)

    for m in s.rows:
        shape = f"T={m} heads={s.heads} D={s.head_dim}"
        yield Case("rms_norm of heads", shape, partial(make, m=m))


def add_rms_norm(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        x, residual = (activations(device, m, s.hidden) for _ in range(2))
        run = partial(kernels().add_rms_norm, x, residual, floats(device, s.hidden), 1e-5)
        return Work(run, 4 * m * s.hidden * BYTES + s.hidden * 4)

    for m in s.rows:
        yield Case("add_rms_norm", f"T={m} H={s.hidden}", partial(make, m=m))


def _activation(op: str, s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        run = partial(getattr(kernels(), op), activations(device, m, 2 * s.inner))
        return Work(run, 3 * m * s.inner * BYTES)

    for m in s.rows:
        yield Case(op, f"T={m} I={s.inner}", partial(make, m=m))


def rotary(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        qkv = activations(device, m, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, _ = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        table = floats(device, max(s.rows), s.rotated)
        run = partial(kernels().rotary, q, k, torch.arange(m, device=device), table)
        return Work(run, m * s.rotated * (2 * (s.heads + s.kv_heads) * BYTES + 4) + m * 8)

    for m in s.rows:
        shape = f"T={m} heads={s.heads}+{s.kv_heads} D'={s.rotated}"
        yield Case("rotary", shape, partial(make, m=m))


def linear(s: Sizes) -> Iterator[Case]:
    for name, pack in PACK.items():
        yield from _layers(s, f"linear {name}", pack, "auto")


def linear_w8a8(s: Sizes) -> Iterator[Case]:
    """FP8 weights times activations rounded to FP8, which --activation-dtype fp8 takes."""
    yield from _layers(s, "linear w8a8", PACK["fp8"], "auto", activation_dtype="fp8")


def linear_torch(s: Sizes) -> Iterator[Case]:
    """cuBLAS, which --linear-backend torch takes."""
    yield from _layers(s, "linear bf16 torch", PACK["bf16"], "torch")


def linear_sequential(s: Sizes) -> Iterator[Case]:
    """The other family of --linear-backend auto."""
    yield from _layers(s, "linear bf16 sequential", PACK["bf16"], "triton_sequential")


def _layers(
    s: Sizes, op: str, pack: Pack, backend: str, activation_dtype: str = "auto"
) -> Iterator[Case]:
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    weights = (
        (qkv, s.hidden),
        (s.hidden, s.heads * s.head_dim),
        (2 * s.inner, s.hidden),
        (s.hidden, s.inner),
    )

    def make(device: str, m: int, n: int, k: int) -> Work:
        x = activations(device, m, k)
        return _product(pack(device, n, k), x, None, kernels(backend, activation_dtype))

    for (n, k), m in product(weights, s.rows):
        yield Case(op, f"M={m} N={n} K={k}", partial(make, m=m, n=n, k=k), cold=True)


def logits(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int, backend: str) -> Work:
        packed = PACK["bf16"](device, s.vocab, s.hidden)
        x = activations(device, m, s.hidden)
        return _product(packed, x, torch.float32, kernels(backend))

    backends = {"logits": "auto", "logits sequential": "triton_sequential", "logits torch": "torch"}
    for op, backend in backends.items():
        for m in (m for m in s.rows if m <= 512):
            sized = partial(make, m=m, backend=backend)
            yield Case(op, f"M={m} N={s.vocab} K={s.hidden}", sized, cold=True)


def rms_norm_gated(s: Sizes) -> Iterator[Case]:
    """The gate is a part of a wider projection."""

    of = s.delta
    if of is None:
        return

    def make(device: str, m: int) -> Work:
        x, weight = activations(device, m, of.v_heads, of.v_dim), floats(device, of.v_dim)
        gate = activations(device, m, 2 * of.v_heads, of.v_dim)[:, of.v_heads :]
        run = partial(kernels().rms_norm_gated, x, gate, weight, 1e-6)
        return Work(run, 3 * x.nbytes + weight.nbytes)

    for m in s.rows:
        yield Case("rms_norm_gated", f"T={m} heads={of.v_heads} D={of.v_dim}", partial(make, m=m))


def mul_sigmoid(s: Sizes) -> Iterator[Case]:
    """The output gate of the attention of models that also have gated delta layers."""

    def make(device: str, m: int, width: int) -> Work:
        x, gate = activations(device, m, width), activations(device, m, 2 * width)[:, width:]
        return Work(partial(kernels().mul_sigmoid, x, gate), 3 * x.nbytes)

    for m in s.rows if s.delta else ():
        width = s.heads * s.head_dim
        yield Case("mul_sigmoid", f"T={m} W={width}", partial(make, m=m, width=width))


def add_adapters(s: Sizes) -> Iterator[Case]:
    """Shares of adapters of rank 16 in a square layer, each row's its own, up to 32 of them."""
    rank = 16

    def make(device: str, m: int) -> Work:
        places, width = min(m, 32), s.hidden
        a = activations(device, places * rank, width).view(places, 1, rank, width)
        b = activations(device, places * rank, width).view(places, rank, width)
        ranks = torch.full((places, 1), rank, dtype=torch.int32, device=device)
        spans = torch.tensor([[0, width, 0]], device=device)
        weights = AdapterWeights(a, b, ranks, torch.ones(places, 1, device=device), spans)
        y, x = activations(device, m, width), activations(device, m, width)
        at = torch.arange(m, dtype=torch.int32, device=device) % places
        run = partial(kernels().add_adapters, y, x, at, weights)
        return Work(run, a.nbytes + b.nbytes + x.nbytes + 2 * y.nbytes)

    for m in s.rows:
        yield Case("add_adapters", f"T={m} H={s.hidden} R={rank}", partial(make, m=m))


def _product(
    packed: PackedLinear, x: Tensor, out_dtype: torch.dtype | None, ops: KernelSet
) -> Work:
    m, n, k = len(x), packed.out_features, packed.in_features
    moved = weight_bytes(packed) + x.nbytes
    moved += m * n * (BYTES if out_dtype is None else out_dtype.itemsize)
    return Work(partial(ops.linear, x, packed, out_dtype), moved, 2 * m * n * k)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "rms_norm": rms_norm,
    "rms_norm_heads": rms_norm_heads,
    "add_rms_norm": add_rms_norm,
    "silu_and_mul": partial(_activation, "silu_and_mul"),
    "gelu_and_mul": partial(_activation, "gelu_and_mul"),
    "rotary": rotary,
    "linear": linear,
    "linear_sequential": linear_sequential,
    "linear_w8a8": linear_w8a8,
    "linear_torch": linear_torch,
    "logits": logits,
    "rms_norm_gated": rms_norm_gated,
    "mul_sigmoid": mul_sigmoid,
    "add_adapters": add_adapters,
    **cases_experts.OPS,
    **cases_fused.OPS,
    **cases_state.OPS,
    **cases_step.OPS,
}
