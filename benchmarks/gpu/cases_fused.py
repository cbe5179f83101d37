"""Cases of the products that bring along what follows them in a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product

import torch
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.store_kv import LayerCache
from surestep_kernels.store_kv.triton import store_kv

from gpu.sizes import BYTES, DTYPE, Case, Sizes, Work, activations, floats, kernels

BLOCK_SIZE = 16


@cache
def _kernels() -> KernelSet:
    return replace(kernels(), store_kv=store_kv)


def _weight(device: str, n: int, k: int) -> PackedLinear:
    return _kernels().pack_linear(activations(device, n, k))


def _linear_activation(op: str, s: Sizes) -> Iterator[Case]:
    def make(device: str, m: int) -> Work:
        x, packed = activations(device, m, s.hidden), _weight(device, 2 * s.inner, s.hidden)
        moved = packed.data.nbytes + x.nbytes + m * s.inner * BYTES
        run = partial(getattr(_kernels(), op), x, packed)
        return Work(run, moved, 4 * m * s.inner * s.hidden)

    for m in s.rows:
        shape = f"M={m} I={s.inner} K={s.hidden}"
        yield Case(op, shape, partial(make, m=m), cold=True)


def linear_add_rms_norm(s: Sizes) -> Iterator[Case]:
    """Behind attention and behind the MLP."""

    def make(device: str, m: int, k: int) -> Work:
        x, residual = activations(device, m, k), activations(device, m, s.hidden)
        packed, weight = _weight(device, s.hidden, k), floats(device, s.hidden)
        run = partial(_kernels().linear_add_rms_norm, x, packed, residual, weight, 1e-5)
        moved = packed.data.nbytes + x.nbytes + 3 * residual.nbytes + weight.nbytes
        return Work(run, moved, 2 * m * s.hidden * k)

    for k in (s.heads * s.head_dim, s.inner):
        for m in s.rows:
            shape = f"M={m} N={s.hidden} K={k}"
            yield Case("linear_add_rms_norm", shape, partial(make, m=m, k=k), cold=True)


def project_heads(s: Sizes) -> Iterator[Case]:
    """Models with gated delta layers have norms and gates too; draft heads read two vectors."""
    others = s.heads if s.delta else 0
    heads = s.heads + others + 2 * s.kv_heads

    def make(device: str, m: int, k: int) -> Work:
        packed, x = _weight(device, heads * s.head_dim, k), activations(device, m, k)
        table = floats(device, m, s.rotated)
        norm = floats(device, s.head_dim) if s.delta else None
        sizes = s.head_dim, s.heads, others, s.kv_heads
        projection = HeadProjection(packed, *sizes, table, norm, norm, 1e-6)
        shape = -(-m // BLOCK_SIZE) + 1, s.kv_heads, BLOCK_SIZE, s.head_dim
        pages = (torch.zeros(shape, dtype=DTYPE, device=device) for _ in "kv")
        where = torch.arange(m, device=device)
        arguments = x, projection, where, LayerCache(*pages), where
        moved = packed.data.nbytes + x.nbytes + m * heads * s.head_dim * BYTES
        run = partial(_kernels().project_heads, *arguments)
        return Work(run, moved, 2 * m * heads * s.head_dim * k)

    drafts = product(s.draft.rows if s.draft else (), (2 * s.hidden,))
    for m, k in (*product(s.rows, (s.hidden,)), *drafts):
        shape = f"M={m} heads={s.heads}+{others}+2*{s.kv_heads} D={s.head_dim} K={k}"
        yield Case("project_heads", shape, partial(make, m=m, k=k), cold=True)


def draft_head(s: Sizes) -> Iterator[Case]:
    """Yield products that an EAGLE-3 head has and its model has not: of several states, and
    logits of a part of the vocabulary."""
    of = s.draft
    if of is None:
        return

    def make(device: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> Work:
        x, packed = activations(device, m, k), _weight(device, n, k)
        run = partial(_kernels().linear, x, packed, out_dtype)
        moved = packed.data.nbytes + x.nbytes + m * n * out_dtype.itemsize
        return Work(run, moved, 2 * m * n * k)

    products = {
        "fc": (s.hidden, of.captured * s.hidden, DTYPE),
        "logits": (of.vocab, s.hidden, torch.float32),
    }
    for (name, (n, k, out_dtype)), m in product(products.items(), of.rows):
        sized = partial(make, m=m, n=n, k=k, out_dtype=out_dtype)
        yield Case(f"draft_head {name}", f"M={m} N={n} K={k}", sized, cold=True)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "linear_silu_and_mul": partial(_linear_activation, "linear_silu_and_mul"),
    "linear_gelu_and_mul": partial(_linear_activation, "linear_gelu_and_mul"),
    "linear_add_rms_norm": linear_add_rms_norm,
    "project_heads": project_heads,
    "draft_head": draft_head,
}
