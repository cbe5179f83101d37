"""Sinks are in a softmax once, wherever its splits are attended to and merged; and windows are as
long as they should be."""

from __future__ import annotations

from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from support.kernels.cases import assert_close, fill_cache, make_context, row_bounds
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows, paged_attention_reference
from surestep_kernels.paged_attention import grid as attention_grid
from surestep_kernels.paged_attention import triton as ops
from surestep_kernels.store_kv import LayerCache
from torch import Tensor

_MODULES = "reference", "grid", "tile", "work", "triton"
_numbers = count()


class Mutant(NamedTuple):
    """A piece of one of the modules, and what stands there instead."""

    module: str
    right: str
    wrong: str

    def load(self, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
        """Return the mutated copy of paged_attention/triton.py, written below `folder`."""
        package = folder / f"mutated_attention_{next(_numbers)}"
        package.mkdir()
        (package / "__init__.py").touch()
        of = Path(attention_grid.__file__).parent
        for name in _MODULES:
            source = (of / f"{name}.py").read_text()
            if name == self.module:
                assert source.count(self.right) == 1, self.right
                source = source.replace(self.right, self.wrong)
            (package / f"{name}.py").write_text(source)
        patch.syspath_prepend(folder)
        return import_module(f"{package.name}.triton")


_SINK = "tl.exp2(tl.load(sinks_ptr + {head}) * LOG2_E - m)"
# Sinks that are among the splits as well as behind them.
SINK_MUTANTS = {
    "counted twice where splits are merged": Mutant(
        "triton",
        "    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)\n    to = ((row.begin",
        f"    total += {_SINK.format(head='head')}\n"
        "    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)\n    to = ((row.begin",
    ),
    "counted in every split of a tile": Mutant(
        "triton",
        "        m, total, acc = merge(m, total, acc, part_m, part_total, part)\n    head =",
        "        heads = inputs.kv_head * C.GROUP + member % C.GROUP\n"
        f"        part_total += {_SINK.format(head='heads').replace('- m', '- part_m')}\n"
        "        m, total, acc = merge(m, total, acc, part_m, part_total, part)\n    head =",
    ),
    "of the heads of another group": Mutant(
        "tile", "tl.load(sinks_ptr + head)", "tl.load(sinks_ptr + head % C.GROUP)"
    ),
}
WINDOW_MUTANTS = {
    "a position more": Mutant("tile", "> last[:, None] - C.WINDOW", ">= last[:, None] - C.WINDOW"),
    "a position less": Mutant(
        "tile", "> last[:, None] - C.WINDOW", "> last[:, None] - C.WINDOW + 1"
    ),
    "begun too late": Mutant("tile", "first + 1 - C.WINDOW", "first + 2 - C.WINDOW"),
    "begun for the last token of a tile": Mutant(
        "tile", "first + 1 - C.WINDOW", "first + tokens - C.WINDOW"
    ),
}


LENGTHS, COUNTS = [520, 90, 300], [2, 1, 3]  # of three splits, of one, of two
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 64  # of gpt-oss, for two of its KV heads
# Of no weight up to all of it, in one group; and some of the other.
SINKS = torch.tensor([-30.0, -1, 0, 1, 2, 4, 8, 60, *[3.0] * 8])
WINDOW = 128


class Case(NamedTuple):
    q: Tensor
    cache: LayerCache
    rows: AttentionRows

    def attend(self, *, window: int, by: ModuleType = ops) -> Tensor:
        made: Tensor = by.paged_attention(
            *self, HEAD_DIM**-0.5, window=window, sinks=SINKS.to(self.q)
        )
        return made

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
    assert usual[:, HEADS // KV_HEADS - 1].abs().max() < 1e-20
    monkeypatch.setattr(attention_grid, "MAX_SCRATCH", 0)
    assert torch.equal(case.attend(window=window), usual)


def unlike(wrong: Tensor, right: Tensor) -> set[int]:
    """Heads of which the two differ."""
    found = set()
    for head in range(HEADS):
        try:
            assert_close(wrong[:, head], right[:, head])
        except AssertionError:
            found.add(head)
    return found


@pytest.mark.parametrize("name", SINK_MUTANTS)
def test_a_wrong_sink_shows(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But in heads where its weight is next to nothing, or everything."""
    mutant, right = SINK_MUTANTS[name].load(tmp_path, monkeypatch), case.expected(window=0)
    if name == "counted in every split of a tile":  # which merges them itself without scratch
        monkeypatch.setattr(f"{mutant.__package__}.grid.MAX_SCRATCH", 0)
    found = unlike(case.attend(window=0, by=mutant), right)
    group = HEADS // KV_HEADS
    wrong = set(range(group, HEADS))
    if name != "of the heads of another group":
        wrong |= set(range(2, group - 1))
    assert wrong <= found
    assert not found & {0, group - 1}


@pytest.mark.parametrize("name", WINDOW_MUTANTS)
def test_a_wrong_window_shows(
    case: Case, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In every head that its sink has not emptied, of all rows or of those with several tokens."""
    mutant = WINDOW_MUTANTS[name].load(tmp_path, monkeypatch)
    wrong, right = case.attend(window=WINDOW, by=mutant), case.expected(window=WINDOW)
    assert set(range(HEADS)) - unlike(wrong, right) <= {HEADS // KV_HEADS - 1}
