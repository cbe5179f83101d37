"""What gpu_ops.py times: a function per op, which yields its cases at the sizes of a model.

An op comes in by a function below and its entry in OPS. It is the device's own: whatever
`load_triton()` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.dispatch import load_triton
from torch import Tensor

DTYPE, BYTES = torch.bfloat16, 2  # of an activation
GROUP = 128


class Work(NamedTuple):
    """One launch, on buffers of its own."""

    run: Callable[[], object]
    nbytes: int  # that have to be read and written
    flop: int = 0


class Case(NamedTuple):
    """`make` allocates on a device. Cold: what it reads comes from memory, never from L2."""

    op: str
    shape: str
    make: Callable[[str], Work]
    cold: bool = False


class Sizes(NamedTuple):
    """A model, and the numbers of tokens of a step."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    vocab: int
    rows: tuple[int, ...] = (1, 4, 8, 64, 256, 4096)
    lookups: tuple[tuple[int, int], ...] = ((1, 4096), (64, 4096), (1, 131072), (64, 131072))


MODELS = (
    Sizes("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 64, 128256),
    Sizes("Qwen3.5-4B", 2560, 9216, 16, 4, 256, 64, 248320),
)
TINY = Sizes("tiny", 128, 136, 2, 1, 8, 4, 70, rows=(1, 3), lookups=((2, 40),))


@cache
def kernels() -> KernelSet:
    """Those of a CUDA device."""
    return load_triton()


def rms_norm(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        run = partial(kernels().rms_norm, _x(device, m, s.hidden), _f32(device, s.hidden), 1e-5)
        return Work(run, 2 * m * s.hidden * BYTES + s.hidden * 4)

    for m in s.rows:
        yield Case("rms_norm", f"T={m} H={s.hidden}", partial(make, m=m))


def rms_norm_heads(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        qkv = _x(device, m, s.heads + 2 * s.kv_heads, s.head_dim)
        run = partial(kernels().rms_norm, qkv[:, : s.heads], _f32(device, s.head_dim), 1e-6)
        return Work(run, 2 * m * s.heads * s.head_dim * BYTES + s.head_dim * 4)

    for m in s.rows:
        shape = f"T={m} heads={s.heads} D={s.head_dim}"
        yield Case("rms_norm of heads", shape, partial(make, m=m))


def add_rms_norm(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        x, residual = (_x(device, m, s.hidden) for _ in range(2))
        run = partial(kernels().add_rms_norm, x, residual, _f32(device, s.hidden), 1e-5)
        return Work(run, 4 * m * s.hidden * BYTES + s.hidden * 4)

    for m in s.rows:
        yield Case("add_rms_norm", f"T={m} H={s.hidden}", partial(make, m=m))


def silu_and_mul(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        run = partial(kernels().silu_and_mul, _x(device, m, 2 * s.inner))
        return Work(run, 3 * m * s.inner * BYTES)

    for m in s.rows:
        yield Case("silu_and_mul", f"T={m} I={s.inner}", partial(make, m=m))


def rotary(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        qkv = _x(device, m, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, _ = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        table = _f32(device, max(s.rows), s.rotated)
        run = partial(kernels().rotary, q, k, torch.arange(m, device=device), table)
        return Work(run, m * s.rotated * (2 * (s.heads + s.kv_heads) * BYTES + 4) + m * 8)

    for m in s.rows:
        shape = f"T={m} heads={s.heads}+{s.kv_heads} D'={s.rotated}"
        yield Case("rotary", shape, partial(make, m=m))


def linear(s: Sizes) -> Iterator[Case]:
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
    weights = (
        (qkv, s.hidden),
        (s.hidden, s.heads * s.head_dim),
        (2 * s.inner, s.hidden),
        (s.hidden, s.inner),
    )

    def make(device: str, m: int, n: int, k: int, pack: Pack) -> Work:
        packed = pack(device, n, k)
        return _product(packed, _x(device, m, k), None)

    for (name, pack), (n, k), m in product(PACK.items(), weights, s.rows):
        sized = partial(make, m=m, n=n, k=k, pack=pack)
        yield Case(f"linear {name}", f"M={m} N={n} K={k}", sized, cold=True)


def logits(s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        packed = _pack_plain(device, s.vocab, s.hidden)
        return _product(packed, _x(device, m, s.hidden), torch.float32)

    for m in (m for m in s.rows if m <= 256):
        yield Case("logits", f"M={m} N={s.vocab} K={s.hidden}", partial(make, m=m), cold=True)


def ngram(s: Sizes) -> Iterator[Case]:
    """Rows without a match read all of their tokens, as every other row does."""

    def make(device: str, rows: int, width: int) -> Work:
        tokens = torch.randint(s.vocab, (rows, width), dtype=torch.int32, device=device)
        columns = torch.arange(rows), torch.full((rows,), width), torch.full((rows,), 4)
        inputs = tokens, *(column.to(device) for column in columns)
        run = partial(kernels().ngram, *inputs, num_drafts=4, max_n=5, min_n=2)
        return Work(run, tokens.nbytes)

    for rows, width in s.lookups:
        shape = f"R={rows} length={width}"
        yield Case("ngram", shape, partial(make, rows=rows, width=width), cold=True)


def _x(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(DTYPE)


def _f32(device: str, *shape: int) -> Tensor:
    return torch.rand(shape, device=device)


Pack = Callable[[str, int, int], PackedLinear]


def _pack_plain(device: str, n: int, k: int) -> PackedLinear:
    return kernels().pack_linear(_x(device, n, k))


def _pack_fp8(device: str, n: int, k: int) -> PackedLinear:
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = _f32(device, n, -(-k // GROUP))
    return kernels().pack_quantized(QuantizedWeight(codes, scales, None, GROUP))


def _pack_int4(device: str, n: int, k: int) -> PackedLinear:
    groups = -(-k // GROUP)
    codes, zeros = (
        torch.randint(16, (n, columns), dtype=torch.uint8, device=device) for columns in (k, groups)
    )
    scales = _f32(device, n, groups).half().float()
    return kernels().pack_quantized(QuantizedWeight(codes, scales, zeros, GROUP))


PACK: dict[str, Pack] = {"bf16": _pack_plain, "fp8": _pack_fp8, "int4": _pack_int4}


def _product(packed: PackedLinear, x: Tensor, out_dtype: torch.dtype | None) -> Work:
    m, n, k = len(x), packed.out_features, packed.in_features
    parts = (packed.data, packed.scales, packed.zeros)
    read = sum(part.nbytes for part in parts if part is not None) + x.nbytes
    written = m * n * (BYTES if out_dtype is None else out_dtype.itemsize)
    return Work(partial(kernels().linear, x, packed, out_dtype), read + written, 2 * m * n * k)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "rms_norm": rms_norm,
    "rms_norm_heads": rms_norm_heads,
    "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "rotary": rotary,
    "linear": linear,
    "logits": logits,
    "ngram": ngram,
}
