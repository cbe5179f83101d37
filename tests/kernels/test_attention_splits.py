"""How paged attention in Triton is divided among programs, and that this does not show."""

from __future__ import annotations

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from support.kernels.cases import (
    Context,
    assert_close,
    fill_cache,
    interpreted_in_turn,
    make_context,
    row_bounds,
)
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows, paged_attention_reference
from surestep_kernels.paged_attention import grid as attention_grid
from surestep_kernels.paged_attention import triton as ops
from surestep_kernels.paged_attention import work as attention_work
from surestep_kernels.store_kv import FP8, LayerCache
from torch import Tensor


class Row(NamedTuple):
    context: int  # row of the context
    start: int
    tokens: int


def all_rows(lengths: list[int], counts: list[int]) -> list[Row]:
    return [Row(i, n - c, c) for i, (n, c) in enumerate(zip(lengths, counts, strict=True))]


def batch(context: Context, rows: list[Row], max_tokens: int = 0) -> AttentionRows:
    slots = torch.tensor([row.context for row in rows])
    start = torch.tensor([row.start for row in rows], dtype=torch.int32)
    counts = [row.tokens for row in rows]
    bounds, most = row_bounds(counts), max_tokens or max(counts)
    return AttentionRows(context.block_tables, slots, bounds, start, most)


def to(gpu: str, value: Any) -> Any:
    """A NamedTuple with its tensors on the device."""
    return type(value)(*(x.to(gpu) if isinstance(x, Tensor) else x for x in value))


def attend(gpu: str, q: Tensor, cache: LayerCache, rows: AttentionRows, **options: Any) -> Tensor:
    options = {k: x.to(gpu) if isinstance(x, Tensor) else x for k, x in options.items()}
    scale = q.shape[2] ** -0.5
    out = ops.paged_attention(q.to(gpu), to(gpu, cache), to(gpu, rows), scale, **options)
    return out.cpu()


def check(gpu: str, q: Tensor, cache: LayerCache, rows: AttentionRows, **options: Any) -> None:
    expected = paged_attention_reference(q, cache, rows, q.shape[2] ** -0.5, **options)
    actual = attend(gpu, q, cache, rows, **options)
    assert actual.isfinite().all()
    assert_close(actual, expected)


# Splits each in a program or all in one; scratch for none of them, for some rows, for all.
SHARES = [(1, 1 << 30), (2, 1 << 30), (7, 1 << 30), (1 << 20, 1 << 30), (5, 0), (3, 4)]


def share_out(monkeypatch: pytest.MonkeyPatch, programs: int, lines: int, q: Tensor) -> None:
    """Have splits shared out among so many programs, with scratch of so many lines."""
    monkeypatch.setattr(attention_grid, "PROGRAMS", programs)
    _, heads, head_dim = q.shape
    monkeypatch.setattr(attention_grid, "MAX_SCRATCH", lines * 4 * heads * (head_dim + 2))


@pytest.mark.parametrize(
    ("dtype", "options", "fp8"),
    [
        (torch.float32, {}, False),
        (torch.bfloat16, {"window": 300}, False),
        (torch.bfloat16, {"sinks": torch.tensor([1.0, -1, 0])}, True),
    ],
)
@interpreted_in_turn
def test_who_attends_to_a_split_does_not_show(
    gpu: str,
    reference: KernelSet,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    options: dict[str, Any],
    fp8: bool,
) -> None:
    """Nor where splits are merged, nor whether the host expects a prompt."""
    lengths, counts = [600, 3, 512, 257], [2, 1, 1, 2]
    context = make_context(lengths, 1, 24, dtype)
    as_fp8 = (FP8, torch.tensor([0.02, 0.5])) if fp8 else ()
    cache, rows = fill_cache(reference, context, *as_fp8), batch(context, all_rows(lengths, counts))
    q = torch.randn(sum(counts), 3, 24).to(dtype)
    check(gpu, q, cache, rows, **options)
    usual = attend(gpu, q, cache, rows, **options)
    assert torch.equal(attend(gpu, q, cache, rows._replace(max_tokens=99), **options), usual)
    for programs, lines in SHARES:
        share_out(monkeypatch, programs, lines, q)
        assert torch.equal(attend(gpu, q, cache, rows, **options), usual), (programs, lines)


def test_merging_in_another_order_shows(
    gpu: str, reference: KernelSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A merge that takes the splits as strides of programs would leave them fails the test above."""
    context = make_context([1500], 1, 24, torch.float32)
    cache, rows = fill_cache(reference, context), batch(context, [Row(0, 1498, 2)])
    q = torch.randn(2, 3, 24)
    share_out(monkeypatch, 1, 0, q)
    whole = attend(gpu, q, cache, rows)
    monkeypatch.undo()
    assert torch.equal(attend(gpu, q, cache, rows), whole)
    source = Path(ops.__file__).read_text()
    in_order, strided = "(base + i) * row.count", "((base + i) * 5 % splits) * row.count"
    assert source.count(in_order) == 1
    (tmp_path / "strided.py").write_text(source.replace(in_order, strided))
    spec = spec_from_file_location("surestep_kernels.paged_attention.m", tmp_path / "strided.py")
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(ops, "_merge_kernel", mutant._merge_kernel)
    other = attend(gpu, q, cache, rows)
    assert_close(other, whole)
    assert not torch.equal(other, whole)


def test_more_rows_than_are_looked_at_together(
    gpu: str, reference: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row gets its own splits, beside prompts and rows without tokens."""
    if gpu == "cpu":  # Triton's interpreter takes its time
        monkeypatch.setattr(attention_work, "_ROWS", tl.constexpr(4))
    num_rows = 300 if gpu == "cuda" else 13
    counts = [1 + i % 2 if i % 7 else 0 for i in range(num_rows)]
    counts[3] = counts[-3] = 20
    lengths = [max(count, 1 + i * 5 % 31) for i, count in enumerate(counts)]
    lengths[-5] = 520
    context = make_context(lengths, 1, 16, torch.float32)
    cache, q = fill_cache(reference, context), torch.randn(sum(counts), 1, 16)
    rows = batch(context, all_rows(lengths, counts))
    check(gpu, q, cache, rows)
    usual = attend(gpu, q, cache, rows)
    share_out(monkeypatch, 5, 3 * num_rows // 4, q)
    assert torch.equal(attend(gpu, q, cache, rows), usual)


@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_programs_follow_the_batch_and_not_the_longest_context(rows: int, tokens: int) -> None:
    def grid(positions: int, window: int = 0) -> attention_grid.Grid:
        sizes = attention_grid.Batch(rows * tokens, rows, tokens, positions, 32, 8, 64, window)
        attending, merging = (of := attention_grid.grid_of(sizes)).programs_of(sizes)
        assert math.prod(attending) <= attention_grid.PROGRAMS + 8
        assert math.prod(merging) == 32 * rows * tokens
        assert 4 * of.lines * 32 * 66 <= attention_grid.MAX_SCRATCH
        return of

    assert grid(1 << 16).shares == grid(131072).shares == grid(1 << 24).shares == 66
    assert grid(1024).shares == min(66, 4 * rows)
    assert grid(131072, window=100).lines == rows * tokens * 2


def test_a_prompt_has_a_program_for_each_tile() -> None:
    sizes = attention_grid.Batch(
        2048 + 40, rows=41, max_tokens=2048, positions=131072, heads=32, kv_heads=8, head_dim=64
    )
    grid = attention_grid.grid_of(sizes)
    assert grid.shares == 66
    assert 2048 // 16 <= grid.tiles <= 2088 // 16 + 41
    assert grid.has_long


def test_padding_is_harmless(gpu: str, reference: KernelSet) -> None:
    """Rows without tokens, rows on the NULL block, tokens of no row, wild entries of tables."""
    context = make_context([40, 200], 2, 40, torch.float32)
    cache, q = fill_cache(reference, context), torch.randn(9, 4, 40)
    plain = attend(gpu, q[:6], cache, batch(context, [Row(0, 35, 5), Row(1, 199, 1)]))
    context.block_tables[0, 3:] = 1 << 30
    context.block_tables[1, 13:] = -7
    padded = batch(context, [Row(0, 0, 0), Row(0, 35, 5), Row(1, 17, 0), Row(1, 199, 1)], 16)
    null = AttentionRows(
        torch.cat((padded.block_tables, torch.zeros_like(padded.block_tables[:1]))),
        torch.cat((padded.slots, torch.tensor([len(padded.block_tables)]))),
        torch.cat((padded.cu_rows, torch.tensor([7], dtype=torch.int32))),
        torch.cat((padded.start, torch.zeros(1, dtype=torch.int32))),
        padded.max_tokens,
    )
    assert torch.equal(attend(gpu, q, cache, null)[:6], plain)
    assert attend(gpu, q[:0], cache, padded).shape == (0, 4, 40)
