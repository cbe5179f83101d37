"""A decoder layer as one op: the bits of its ops one by one, whatever rows are beside a row."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, fill_cache, make_affine, make_context
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.mixers.dense_layer import DenseLayer, LayerTokens
from surestep_kernels.mixers.head_projection import HeadProjection
from surestep_kernels.mixers.kv_cache import LayerCache
from surestep_kernels.mixers.paged_attention import AttentionRows, paged_attention_reference
from surestep_kernels.ops.linear import WeightFormat
from surestep_kernels.ops.silu_and_mul import silu_and_mul_reference
from torch import Tensor

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 72, 104, 6, 2, 24, 200
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
STARTS, COUNTS = [0, 70, 9, 130], [40, 1, 5, 1]  # tokens in the cache, and of a step, by row


class Case(NamedTuple):
    packed: bool
    bias: bool
    norms: bool
    window: int
    sinks: bool
    inputs: int = WIDTH  # of the projection
    rotated: int = HEAD_DIM
    pages: torch.dtype | None = None  # of the cache; None: the model's


CASES = {
    "plain": Case(packed=False, bias=False, norms=False, window=0, sinks=False),
    "fp8 cache": Case(
        packed=False, bias=False, norms=False, window=0, sinks=False, pages=torch.float8_e4m3fn
    ),
    "packed": Case(packed=True, bias=False, norms=False, window=0, sinks=False),
    "everything": Case(
        packed=True, bias=True, norms=True, window=33, sinks=True, inputs=2 * WIDTH, rotated=16
    ),
}


def make_layer(kernels: KernelSet, case: Case, dtype: torch.dtype) -> DenseLayer:
    def weight(outputs: int, inputs: int) -> PackedLinear:
        bias = torch.randn(outputs).to(dtype) if case.bias else None
        if case.packed:
            affine = make_affine(WeightFormat.AFFINE4, outputs, inputs, 32)
            return kernels.pack_quantized(affine, bias)
        return kernels.pack_linear((torch.randn(outputs, inputs) * 0.2).to(dtype), bias)

    torch.manual_seed(5)
    angles = torch.randn(POSITIONS, case.rotated // 2)
    q_norm, k_norm = torch.rand(2, HEAD_DIM) + 0.5
    projection = HeadProjection(
        packed=weight(QKV, case.inputs),
        head_dim=HEAD_DIM,
        num_heads=HEADS,
        num_others=0,
        num_kv_heads=KV_HEADS,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        q_norm=q_norm if case.norms else None,
        k_norm=k_norm if case.norms else None,
        eps=1e-6,
    )
    return DenseLayer(
        projection=projection,
        scale=HEAD_DIM**-0.5,
        window=case.window,
        sinks=torch.randn(HEADS) if case.sinks else None,
        out=weight(WIDTH, HEADS * HEAD_DIM),
        post_norm=torch.rand(WIDTH) + 0.5,
        gate_up=weight(2 * INNER, WIDTH),
        down=weight(WIDTH, INNER),
        eps=1e-5,
    )


class Step(NamedTuple):
    x: Tensor
    residual: Tensor
    next_norm: Tensor
    tokens: LayerTokens
    cache: LayerCache

    def copy(self) -> Step:
        cache = LayerCache(self.cache.k.clone(), self.cache.v.clone())
        return self._replace(residual=self.residual.clone(), cache=cache)

    def row(self, index: int) -> Step:
        """One row of it alone."""
        rows = self.tokens.rows
        own = slice(int(rows.cu_rows[index]), int(rows.cu_rows[index + 1]))
        alone = rows._replace(
            slots=rows.slots[index : index + 1],
            cu_rows=torch.tensor([0, own.stop - own.start], dtype=torch.int32),
            start=rows.start[index : index + 1],
        )
        tokens = LayerTokens(self.tokens.positions[own], alone, self.tokens.kv_slots[own])
        return self._replace(x=self.x[own], residual=self.residual[own], tokens=tokens)


def make_step(kernels: KernelSet, case: Case, dtype: torch.dtype) -> Step:
    torch.manual_seed(6)
    lengths = [start + count for start, count in zip(STARTS, COUNTS, strict=True)]
    context = make_context(lengths, KV_HEADS, HEAD_DIM, dtype)
    cache, tables = fill_cache(kernels, context, case.pages), context.block_tables
    ranges = [torch.arange(s, s + c) for s, c in zip(STARTS, COUNTS, strict=True)]
    places = [tables[r].long()[p // 16] * 16 + p % 16 for r, p in enumerate(ranges)]
    bounds = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0)], dtype=torch.int32)
    start = torch.tensor(STARTS, dtype=torch.int32)
    rows = AttentionRows(tables, torch.arange(len(COUNTS)), bounds, start, max(COUNTS))
    return Step(
        x=torch.randn(sum(COUNTS), case.inputs).to(dtype),
        residual=torch.randn(sum(COUNTS), WIDTH).to(dtype),
        next_norm=torch.rand(WIDTH) + 0.5,
        tokens=LayerTokens(torch.cat(ranges), rows, torch.cat(places)),
        cache=cache,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_has_the_bits_of_its_ops(native: KernelSet, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    layer, one = make_layer(native, case, dtype), make_step(native, case, dtype)
    native.set_num_threads(2)
    by_op, together = one.copy(), one.copy()
    expected = KernelSet.dense_layer(native, layer)(*by_op)
    assert torch.equal(native.dense_layer(layer)(*together), expected)
    assert torch.equal(together.residual, by_op.residual)
    for made, wanted in zip(together.cache.pages, by_op.cache.pages, strict=True):
        assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", CASES)
def test_is_the_reference_up_to_rounding(
    native: KernelSet, reference: KernelSet, name: str
) -> None:
    case, dtype = CASES[name], torch.float32
    made, expected = (
        kernels.dense_layer(make_layer(kernels, case, dtype))(*make_step(kernels, case, dtype))
        for kernels in (native, reference)
    )
    assert_close(made, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, name: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    run = native.dense_layer(make_layer(native, case, dtype))
    step = make_step(native, case, dtype)
    together, bounds = run(*step.copy()), step.tokens.rows.cu_rows
    for index in range(len(COUNTS)):
        native.set_num_threads(1 + index % 2)
        alone = run(*step.row(index).copy())
        assert torch.equal(alone, together[bounds[index] : bounds[index + 1]])


def test_other_ops_are_called_one_by_one(native: KernelSet) -> None:
    layer = make_layer(native, CASES["plain"], torch.float32)
    for other in (
        replace(native, paged_attention=paged_attention_reference),
        replace(native, silu_and_mul=silu_and_mul_reference),
    ):
        assert type(other.dense_layer(layer)) is not type(native.dense_layer(layer))
