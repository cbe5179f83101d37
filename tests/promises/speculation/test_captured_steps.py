"""What can go wrong with captured steps, put in one at a time: the parity matrix sees each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.parity.bench import NEIGHBOURS, Conditions, ParityBench, build_runner, same
from support.parity.captured_steps import capture_all, graphs_of
from support.parity.cases import EOS, VOCAB
from support.parity.drafters import TRUTH
from support.parity.local_engine import Answer, LocalEngine, one_rank_behind
from surestep_common.errors import InternalError, SurestepError
from surestep_kernels.gather_step import StepInputs, gather_step_reference
from surestep_kernels.slot_state import OUT_OF_BOUNDS, DraftIds, SlotState, StepRows
from surestep_kernels.table import STEP_REFERENCE
from surestep_scheduler.core.state import SchedulerState
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.step import graphs as graphs_module
from surestep_worker.step.buckets import StepSize, make_buckets
from surestep_worker.step.transfer import Download, Layout, Packed, _arrays, _names
from torch import Tensor

CAPTURED = Conditions(step_ops=STEP_REFERENCE, graphs=True)

Mutant = Callable[[pytest.MonkeyPatch], None]


def stale(column: str) -> Mutant:
    """One column keeps what the step before has left."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        fill, left = Layout.fill, dict[int, Any]()

        def filled(self: Layout, tree: Any, into: Any) -> None:
            fill(self, tree, into)
            at = list(_names(tree)).index(column)
            first, size = self._first[at], self._size[at]
            before = left.get(first)
            left[first] = into[first : first + size].copy()
            if before is not None and len(before) == size:
                into[first : first + size] = before

        patch.setattr(Layout, "fill", filled)

    return mutate


def padding_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """Behind the columns of a step stands what an earlier one has had there."""
    fill, left = Layout.fill, dict[int, Any]()

    def filled(self: Layout, tree: Any, into: Any) -> None:
        fill(self, tree, into)
        before = left.get(id(self))
        left[id(self)] = into.copy()
        if before is not None:
            for array, first, size in zip(_arrays(tree), self._first, self._size, strict=True):
                into[first + array.size : first + size] = before[first + array.size : first + size]

    patch.setattr(Layout, "fill", filled)


def results_read_too_late(patch: pytest.MonkeyPatch) -> None:
    """What is reported is fetched when it is asked for, not before the next replay."""

    def not_copied(self: Download, packed: Packed) -> None:
        self._parts, self._event, self._host = packed.parts, None, packed.words

    patch.setattr(Download, "__init__", not_copied)


def captured_when_first_used(patch: pytest.MonkeyPatch) -> None:
    """What a step finds when it is captured stays in it."""
    capture = graphs_module.Graphs._capture

    def once(self: Any, run: Any) -> Any:
        replay, kept = capture(self, run), list[Any]()

        def replayed() -> Any:
            if not kept:
                kept.append(replay())
            return kept[0]

        return replayed

    patch.setattr(graphs_module.Graphs, "_capture", once)


def whole_steps_for_all(patch: pytest.MonkeyPatch) -> None:
    """Penalties, biases and restricted draws are not looked for."""
    find = graphs_module.Graphs.find
    patch.setattr(
        graphs_module.Graphs, "find", lambda self, size, *, whole: find(self, size, whole=True)
    )


MUTANTS: dict[str, Mutant] = {
    **{f"stale {name}": stale(name) for name in ("slot", "token_row", "seed_low", "hidden_index")},
    **{
        f"stale {name}": stale(name)
        for name in ("cu_rows", "window", "max_drafts", "position_window")
    },
    "padding not cleared": padding_not_cleared,
    "results read too late": results_read_too_late,
    "captured when first used": captured_when_first_used,
    "whole steps for all": whole_steps_for_all,
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.rotates(3)
def test_every_mutant_is_caught(
    bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name](monkeypatch)
    try:
        answers = bench.run("mixed", drafter="oracle", k=3, depth=1, conditions=CAPTURED)
    except (SurestepError, IndexError, RuntimeError, TypeError):  # what was asked for is missing
        return
    assert wrong(bench, answers)


def wrong(bench: ParityBench, answers: dict[str, Answer]) -> list[str]:
    return [name for name, expected in bench.expected.items() if not same(answers[name], expected)]


def test_a_bucket_that_is_too_small_is_noticed(
    bench: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = make_buckets(8, 4, 24)

    def smallest(size: StepSize, _: object) -> object:
        return min(buckets)

    monkeypatch.setattr(graphs_module, "find_bucket", smallest)
    with pytest.raises(AssertionError):
        bench.run("mixed", drafter="oracle", k=3, depth=1, conditions=CAPTURED)


def test_after_an_error_word_the_same_graphs_serve_another_epoch(bench: ParityBench) -> None:
    """A step tells of something that does not exist; the word is 0 again in the next one."""
    TRUTH.learn(bench.truth, vocab_size=VOCAB, stop_id=EOS)
    where, some = NEIGHBOURS["mixed"], bench.requests[:6]
    breaks = False

    def gather_step(
        rows: StepRows,
        drafts: DraftIds,
        state: SlotState,
        error: Tensor,
        block_size: int,
        num_blocks: int,
    ) -> StepInputs:
        if breaks:
            error |= OUT_OF_BOUNDS
        return gather_step_reference(rows, drafts, state, error, block_size, num_blocks)

    ops = replace(STEP_REFERENCE, gather_step=gather_step)
    built = build_runner(bench._model, TensorParallel(), where, "oracle", 3, ops)
    runner = built.runner
    step = one_rank_behind(runner)
    runner.prepare()
    capture_all(runner)

    def break_it(state: SchedulerState) -> None:
        nonlocal breaks
        breaks = True

    broken = LocalEngine(step, built.facts, depth=1, after_apply=break_it)
    with pytest.raises(InternalError, match="does not exist"):
        broken.run(some)
    breaks = False
    mended = LocalEngine(one_rank_behind(runner, epoch=2), built.facts, epoch=2, depth=1)
    answers = mended.run(some)
    for request in some:
        assert same(answers[request.id], bench.expected[request.id]), request.id
    assert graphs_of(runner).num_missed < 20


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failed_capture_costs_launches_and_nothing_else(
    bench: ParityBench, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, count = graphs_module.Graphs._capture, 0

    def every_other(self: Any, run: Any) -> Any:
        nonlocal count
        count += 1
        if count % 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, run)

    monkeypatch.setattr(graphs_module.Graphs, "_capture", every_other)
    conditions = Conditions(step_ops=STEP_REFERENCE, late=True)
    answers = bench.run("mixed", drafter="ragged", k=4, depth=depth, conditions=conditions)
    assert not wrong(bench, answers)
    kinds, missed = bench.captured
    assert 0 < kinds < missed
