"""Inputs and comparisons that the kernel tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from surestep_kernels import KernelSet, QuantizedWeight
from surestep_kernels.columns.cpu.compiling import processor_features
from surestep_kernels.linear import FP16_HEADERS, WeightFormat
from surestep_kernels.linear.reference import E2M1
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.store_kv import LayerCache
from surestep_kernels.table import REFERENCE
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = [WeightFormat.FP8, WeightFormat.INT4, WeightFormat.NVFP4]
BLOCK_SIZE = 16
# Seconds a case in Triton's interpreter; a GPU runs all of them.
interpreted_in_turn = pytest.mark.rotates(1 if torch.cuda.is_available() else 2)


# What products of bf16 inputs may be off where the machine takes them as numbers of 15 bits.
OF_15_BITS = 2e-5


def of_words(kernels: KernelSet, format_: WeightFormat, dtype: torch.dtype) -> bool:
    """Whether a product of 4-bit floats takes its inputs so: in C, with AVX2 and no AVX-512."""
    floats, features = (WeightFormat.MXFP4, WeightFormat.NVFP4), processor_features().split()
    here = kernels.name == "C" and "avx2" in features and "avx512f" not in features
    return here and format_ in floats and dtype is torch.bfloat16


def assert_close(actual: Tensor, expected: Tensor, *, ratio: float | None = None) -> None:
    """Equal up to `ratio`, or to rounding in the element type, of the root mean square."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    ratio = ratio or (2e-6 if expected.dtype is torch.float32 else 1e-2)
    if actual.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max()
    assert error <= ratio * (8 * expected.double().square().mean().sqrt() + 1e-6), error


def assert_rows_alone(
    kernels: KernelSet, op: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
) -> None:
    """A row by itself has the bits that it has among all, by however many threads."""
    kernels.set_num_threads(2)
    together = op(*inputs)
    kernels.set_num_threads(1)
    count = len(inputs[0])
    for i in {*range(0, count, -(-count // 10)), count - 1}:
        alone = op(*(x[i : i + 1] for x in inputs))
        for part, whole in zip(_parts(alone), _parts(together), strict=True):
            assert torch.equal(part[0], whole[i])


def _parts(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made


@dataclass(frozen=True)
class Context:
    """The keys and values of one sequence per row, in the order of their positions."""

    k: list[Tensor]  # [L, Hkv, D] per row
    v: list[Tensor]
    block_tables: Tensor  # i32[R, B]
    block_size: int = BLOCK_SIZE


def make_context(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = BLOCK_SIZE,
) -> Context:
    """Random sequences on shuffled pages. Page 0, the NULL block, fills the unused entries."""
    pages = [-(-length // block_size) for length in lengths]
    free = (torch.randperm(sum(pages)) + 1).int()
    tables = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int32)
    for row, count in enumerate(pages):
        tables[row, :count], free = free[:count], free[count:]
    k, v = ([torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths] for _ in "kv")
    return Context(k, v, tables, block_size)


def fill_cache(
    kernels: KernelSet,
    context: Context,
    dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> LayerCache:
    """A cache of the context's or another dtype that holds the context and NaN everywhere else."""
    if kernels.name.startswith("Triton"):
        kernels = REFERENCE  # has the same pages, and no interpreter to go through
    kv_heads, head_dim = context.k[0].shape[1:]
    num_blocks = int(context.block_tables.max()) + 2
    shape = kernels.kv_cache_shape(num_blocks, context.block_size, kv_heads, head_dim)
    k, v = (torch.full(shape, torch.nan).to(dtype or context.k[0].dtype) for _ in "kv")
    cache = LayerCache(k, v, scales)
    for row, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
        kernels.store_kv(k, v, cache, slots_of(context, row))
    return cache


def slots_of(context: Context, row: int) -> Tensor:
    """Flat cache slots i64[L] of all positions of a row."""
    position, size = torch.arange(len(context.k[row])), context.block_size
    return context.block_tables[row].long()[position // size] * size + position % size


def row_bounds(counts: list[int]) -> Tensor:
    """cu_rows i32[R+1] of rows with these token counts."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def make_quantized(format_: WeightFormat, rows: int, columns: int, group: int) -> QuantizedWeight:
    """Random codes of every size, subnormal ones included, and random scales and zero points."""
    groups = -(-columns // group)
    if format_ is WeightFormat.MXFP4:
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
        return QuantizedWeight(
            codes, torch.randint(110, 126, (rows, groups), dtype=torch.uint8), None, group
        )
    scales = torch.rand(rows, groups).half().float() / 16
    if format_ is WeightFormat.FP8:
        codes = torch.randn(rows, columns) * 10.0 ** torch.randint(-3, 3, (rows, columns))
        return QuantizedWeight(codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales, None, group)
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
    if format_ is WeightFormat.NVFP4:
        return QuantizedWeight(codes, torch.rand(rows, groups) / 16, None, group)
    zeros = torch.randint(16, (rows, groups), dtype=torch.uint8)
    return QuantizedWeight(codes, scales, zeros, group)


AFFINE = [format_ for format_ in WeightFormat if format_.name.startswith("AFFINE")]


def make_affine(format_: WeightFormat, rows: int, columns: int, group: int) -> QuantizedWeight:
    """Random codes, scales and mins, which cancel roughly; they fit fp16 if the format says so."""
    bits, groups = 4 if format_.name.startswith("AFFINE4") else 8, -(-columns // group)
    codes = torch.randint(1 << bits, (rows, columns), dtype=torch.uint8)
    scales = torch.rand(rows, groups) / (1 << bits)
    mins = -scales * (torch.rand(rows, groups) + 0.5) * (1 << bits - 1)
    if format_ in FP16_HEADERS:
        scales, mins = scales.half().float(), mins.half().float()
    return QuantizedWeight(codes, scales, None, group, mins, bits)


def exact_weight(weight: QuantizedWeight) -> Tensor:
    """The weight in fp64, from its definition, element by element of every group; not of MXFP4."""
    of = torch.arange(weight.codes.shape[1]) // weight.group_size
    values = weight.codes.double()
    if weight.format is WeightFormat.NVFP4:
        values = torch.tensor(E2M1, dtype=torch.float64)[weight.codes.long()]
    if weight.zeros is not None:
        values = values - weight.zeros[:, of].double()
    scaled = values * weight.scales[:, of].double()
    return scaled if weight.mins is None else scaled + weight.mins[:, of].double()


LENGTHS, COUNTS = [1, 17, 64, 70, 150, 333], [1, 5, 1, 3, 100, 2]  # seen by, and of, each row


def batch_of(context: Context) -> AttentionRows:
    """The rows together."""
    start = torch.tensor(LENGTHS) - torch.tensor(COUNTS)
    numbers = torch.arange(len(COUNTS)), row_bounds(COUNTS), start.int(), max(COUNTS)
    return AttentionRows(context.block_tables, *numbers)


def tokens_alone(context: Context) -> Iterator[tuple[int, AttentionRows]]:
    """Each token of the batch, by its index, as a row of its own."""
    places = (
        (row, position)
        for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))
        for position in range(length - count, length)
    )
    for token, (row, position) in enumerate(places):
        rows = torch.tensor([row]), row_bounds([1]), torch.tensor([position]).int(), 1
        yield token, AttentionRows(context.block_tables, *rows)


def attends_alike_alone(
    kernels: KernelSet,
    q: Tensor,
    cache: LayerCache,
    context: Context,
    made: Tensor,
    **options: object,
) -> bool:
    """Whether every token has the same bits alone as in `made`, the result of the batch."""
    return all(
        torch.equal(attend(kernels, q[token : token + 1], cache, rows, **options)[0], made[token])
        for token, rows in tokens_alone(context)
    )


def attend(
    kernels: KernelSet, q: Tensor, cache: LayerCache, rows: AttentionRows, **options: object
) -> Tensor:
    """Attention with scores scaled as they usually are."""
    return kernels.paged_attention(q, cache, rows, q.shape[2] ** -0.5, **options)  # type: ignore[arg-type]
