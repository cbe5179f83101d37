"""Bugs that grammars under speculation invite, put back one at a time: the matrix sees each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.parity import grammars
from support.parity.bench import Conditions, ParityBench, same
from support.parity.grammar_mutants import IN_PROCESSES, mutated
from support.parity.grammars import Reader
from surestep_common.errors import SurestepError
from surestep_common.invariants import LedgerError
from surestep_kernels.table import STEP_REFERENCE
from surestep_scheduler.core.sequence import Finish
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.step.order import Guided

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {name: mutated(name) for name in IN_PROCESSES}


def mutant(mutate: Mutant) -> Mutant:
    MUTANTS[mutate.__name__] = mutate
    return mutate


def wrong(bench: ParityBench, *, device: bool = False) -> set[str]:
    """Names of answers that are not what is expected, or not what was asked for."""
    reader, found = Reader(bench.folder), set[str]()
    conditions = Conditions(shuffle_seed=5, step_ops=STEP_REFERENCE if device else None)
    for drafter in ("flip-1", "oracle"):
        answers = bench.run("mixed", drafter=drafter, k=4, depth=2, conditions=conditions)
        for name, expected in bench.expected.items():
            answer = answers[name]
            if not same(answer, expected):
                found.add(name)
            elif answer.finish is Finish.STOP:
                reader.check(name, answer.token_ids)
    return found


@mutant
def emitted_tokens_are_forgotten_on_admission(patch: pytest.MonkeyPatch) -> None:
    """As if the walk began where the new tenancy does."""

    def admit(self: GrammarTable, slot: int, params: Any, prompt_len: int) -> None:
        original(self, slot, params, prompt_len + 1)

    original = GrammarTable.admit
    patch.setattr(GrammarTable, "admit", admit)


@mutant
def the_grammar_begins_with_the_window(patch: pytest.MonkeyPatch) -> None:
    """The end of reasoning inside a window is noticed behind it only."""

    def unmasked(self: Guided, geometry: Any) -> Any:
        for made in self.windows.values():
            if made.first:
                made.masks.clear()
        return original(self, geometry)

    original = Guided._masks
    patch.setattr(Guided, "_masks", unmasked)


@mutant
def masks_of_another_row(patch: pytest.MonkeyPatch) -> None:
    def shifted(self: Guided, geometry: Any) -> Any:
        masks = original(self, geometry)
        return masks if masks is None else masks._replace(words=np.roll(masks.words, 1, axis=0))

    original = Guided._masks
    patch.setattr(Guided, "_masks", shifted)


@pytest.mark.parametrize("device", [False, True])
def test_nothing_is_wrong_without_a_mutant(guided_bench: ParityBench, device: bool) -> None:
    assert wrong(guided_bench, device=device) == set()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(
    guided_bench: ParityBench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name](monkeypatch)
    if name in IN_PROCESSES:
        monkeypatch.setattr(grammars, "_COMPILERS", {})
    try:
        found = wrong(guided_bench)
    except (AssertionError, ValueError, LedgerError, SurestepError):
        return  # an answer that is not what was asked for, or a check of the ledger
    assert found
