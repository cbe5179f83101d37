"""Sinks are in a softmax once, wherever its splits are attended to and merged."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.kernels.cases import assert_close, fill_cache, make_context, row_bounds
from surestep_kernels import KernelSet
from surestep_kernels.gpu.attention import attention_grid
from surestep_kernels.gpu.attention import paged_attention as ops
from surestep_kernels.mixers.kv_cache import LayerCache
from surestep_kernels.mixers.paged_attention import AttentionRows, paged_attention_reference
from torch import Tensor

LENGTHS, COUNTS = [700, 90, 520], [2, 1, 3]  # of three splits, of one, of three
HEADS, KV_HEADS, HEAD_DIM = 8, 1, 64  # of gpt-oss, for one of its KV heads
SINKS = torch.tensor([-30.0, -1, 0, 1, 2, 4, 8, 60])  # of no weight up to all of it
WINDOW = 128


class Case(NamedTuple):
    q: Tensor
    cache: LayerCache
    rows: AttentionRows

    def attend(self, *, window: int) -> Tensor:
        return ops.paged_attention(*self, HEAD_DIM**-0.5, window=window, sinks=SINKS.to(self.q))

    def expected(self, *, window: int) -> Tensor:
        return paged_attention_reference(
            *self, HEAD_DIM**-0.5, window=window, sinks=SINKS.to(self.q)
        )


@pytest.fixture
def case(gpu: str, reference: KernelSet) -> Case:
    context = make_context(LENGTHS, KV_HEADS, HEAD_DIM, torch.float32)
    cache = fill_cache(reference, context)
    start = torch.tensor(LENGTHS) - torch.tensor(COUNTS)
    rows = AttentionRows(
        context.block_tables, torch.arange(3), row_bounds(COUNTS), start.int(), max(COUNTS)
    )
    return Case(
        torch.randn(sum(COUNTS), HEADS, HEAD_DIM).to(gpu),
        LayerCache(cache.k.to(gpu), cache.v.to(gpu)),
        rows._replace(
            block_tables=rows.block_tables.to(gpu),
            slots=rows.slots.to(gpu),
            cu_rows=rows.cu_rows.to(gpu),
            start=rows.start.to(gpu),
        ),
    )


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_sink_counts_once_wherever_splits_are_merged(
    case: Case, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second kernel, or, without scratch, by the program that attends to all of them."""
    usual = case.attend(window=window)
    assert_close(usual, case.expected(window=window))
    assert usual[:, -1].abs().max() < 1e-20
    monkeypatch.setattr(attention_grid, "MAX_SCRATCH", 0)
    assert torch.equal(case.attend(window=window), usual)


def test_a_sink_that_is_counted_twice_shows(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A merge in which it is among the splits as well as behind them."""
    source = Path(ops.__file__).read_text()
    end = "    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)\n    to = ((row.begin"
    twice = tmp_path / "twice.py"
    assert source.count(end) == 1
    once_more = "    total += tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - m)\n"
    twice.write_text(source.replace(end, once_more + end))
    spec = spec_from_file_location("surestep_kernels.gpu.attention.twice", twice)
    assert spec is not None
    assert spec.loader is not None
    mutant = module_from_spec(spec)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(ops, "_merge_kernel", mutant._merge_kernel)
    wrong, right = case.attend(window=0), case.expected(window=0)
    assert_close(wrong[:, 0], right[:, 0])
    for head in range(2, HEADS - 1):
        with pytest.raises(AssertionError):
            assert_close(wrong[:, head], right[:, head])
