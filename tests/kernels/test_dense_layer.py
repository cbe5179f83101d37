"""Decoder layers as one op: the bits of their ops one by one, whatever rows are beside a row."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.kernels.cases import DTYPES, assert_close, fill_cache, make_affine, make_context
from surestep_kernels import KernelSet, PackedLinear
from surestep_kernels.dense_layer import DenseLayer, LayerTokens
from surestep_kernels.linear import WeightFormat
from surestep_kernels.paged_attention import AttentionRows, paged_attention_reference
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.silu_and_mul import silu_and_mul_reference
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 72, 104, 6, 2, 24, 200
DEPTH = 3
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


def make_layer(kernels: KernelSet, case: Case, dtype: torch.dtype, seed: int = 5) -> DenseLayer:
    def weight(outputs: int, inputs: int) -> PackedLinear:
        bias = torch.randn(outputs).to(dtype) if case.bias else None
        if case.packed:
            affine = make_affine(WeightFormat.AFFINE4, outputs, inputs, 32)
            return kernels.pack_quantized(affine, bias)
        return kernels.pack_linear((torch.randn(outputs, inputs) * 0.2).to(dtype), bias)

    torch.manual_seed(seed)
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


def make_layers(kernels: KernelSet, case: Case, dtype: torch.dtype) -> list[DenseLayer]:
    """The first reads as many inputs as the case says; the others what the one before made."""
    behind = case._replace(inputs=WIDTH)
    cases = [case, *[behind] * (DEPTH - 1)]
    return [make_layer(kernels, each, dtype, seed) for seed, each in enumerate(cases)]


def make_norms() -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.rand(WIDTH) + 0.5 for _ in range(DEPTH)]


class Step(NamedTuple):
    x: Tensor
    residual: Tensor
    places: list[tuple[LayerTokens, LayerCache]]

    def copy(self) -> Step:
        def copied(tokens: LayerTokens, cache: LayerCache) -> tuple[LayerTokens, LayerCache]:
            return tokens, LayerCache(cache.k.clone(), cache.v.clone())

        places = [copied(*place) for place in self.places]
        return self._replace(residual=self.residual.clone(), places=places)

    def row(self, index: int) -> Step:
        """One row of it alone."""
        tokens, _ = self.places[0]
        rows = tokens.rows
        own = slice(int(rows.cu_rows[index]), int(rows.cu_rows[index + 1]))
        alone = rows._replace(
            slots=rows.slots[index : index + 1],
            cu_rows=torch.tensor([0, own.stop - own.start], dtype=torch.int32),
            start=rows.start[index : index + 1],
        )
        of_row = LayerTokens(tokens.positions[own], alone, tokens.kv_slots[own])
        places = [(of_row, cache) for _, cache in self.places]
        return Step(self.x[own], self.residual[own], places)


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
    tokens = LayerTokens(torch.cat(ranges), rows, torch.cat(places))
    caches = [fill_cache(kernels, context, case.pages) for _ in range(DEPTH - 1)]
    return Step(
        x=torch.randn(sum(COUNTS), case.inputs).to(dtype),
        residual=torch.randn(sum(COUNTS), WIDTH).to(dtype),
        places=[(tokens, each) for each in (cache, *caches)],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_have_the_bits_of_their_ops(native: KernelSet, name: str, dtype: torch.dtype) -> None:
    case, norms = CASES[name], make_norms()
    layers, one = make_layers(native, case, dtype), make_step(native, case, dtype)
    native.set_num_threads(2)
    by_op, together = one.copy(), one.copy()
    expected = KernelSet.dense_layers(native, layers, norms)(*by_op)
    assert torch.equal(native.dense_layers(layers, norms)(*together), expected)
    assert torch.equal(together.residual, by_op.residual)
    for (_, made), (_, wanted) in zip(together.places, by_op.places, strict=True):
        for pages, others in zip(made.pages, wanted.pages, strict=True):
            assert torch.equal(pages.view(torch.uint8), others.view(torch.uint8))


def test_a_part_of_them_can_be_run_at_a_time(native: KernelSet) -> None:
    case, dtype, norms = CASES["everything"], torch.bfloat16, make_norms()
    step = make_step(native, case, dtype)
    run = native.dense_layers(make_layers(native, case, dtype), norms)
    at_once = step.copy()
    expected = run(*at_once)
    for _ in range(2):  # what is known of a part is not taken for another
        parts = step.copy()
        x = run(parts.x, parts.residual, parts.places[:1])
        x = run(x, parts.residual, parts.places[1:], 1)
        assert torch.equal(x, expected)
        assert torch.equal(parts.residual, at_once.residual)


@pytest.mark.parametrize("name", CASES)
def test_one_is_the_reference_up_to_rounding(
    native: KernelSet, reference: KernelSet, name: str
) -> None:
    case, dtype = CASES[name], torch.float32

    def of_first(kernels: KernelSet) -> Tensor:  # by the second, values are rounded differently
        x, residual, places = make_step(kernels, case, dtype)
        run = kernels.dense_layers(make_layers(kernels, case, dtype), make_norms())
        return run(x, residual, places[:1])

    assert_close(of_first(native), of_first(reference))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_does_not_depend_on_the_others(
    native: KernelSet, name: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    run = native.dense_layers(make_layers(native, case, dtype), make_norms())
    step = make_step(native, case, dtype)
    together, bounds = run(*step.copy()), step.places[0][0].rows.cu_rows
    for index in range(len(COUNTS)):
        native.set_num_threads(1 + index % 2)
        alone = run(*step.row(index).copy())
        assert torch.equal(alone, together[bounds[index] : bounds[index + 1]])


def test_other_ops_are_called_one_by_one(native: KernelSet) -> None:
    layers, norms = make_layers(native, CASES["plain"], torch.float32), make_norms()
    for other in (
        replace(native, paged_attention=paged_attention_reference),
        replace(native, silu_and_mul=silu_and_mul_reference),
    ):
        assert type(other.dense_layers(layers, norms)) is not type(
            native.dense_layers(layers, norms)
        )
