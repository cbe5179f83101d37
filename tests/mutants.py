"""Bugs that speculative decoding is known for, put back into the worker one at a time.

Each mutant patches what the runner calls; nothing in the product knows of them. Numbers are issues
of vllm-project/vllm in which the bug, or one of its kind, was reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from surestep_proto import engine_pb2 as pb
from surestep_worker import drafting, runner
from surestep_worker import host_step as product
from surestep_worker.device.graphs import Graphs
from surestep_worker.plan import Rows
from surestep_worker.sampling import Verdict
from surestep_worker.slots import Slots
from surestep_worker.spec import Drafts

PERTURBED_STEP = 9
PERTURBED_LEN = 20  # tokens

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def _mutant(mutate: Mutant) -> Mutant:
    MUTANTS[mutate.__name__] = mutate
    return mutate


def _around(patch: pytest.MonkeyPatch, target: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace target.name by `change(original, *args, **kwargs)`."""
    original = getattr(target, name)
    patch.setattr(target, name, wraps(original)(lambda *a, **kw: change(original, *a, **kw)))


@_mutant
def counts_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """Accepted counts are kept by row of the batch instead of by slot (#45100, #41190)."""

    def commit(original: Any, self: Slots, step: int, slot: Any, *counts: Any) -> None:
        original(self, step, np.arange(len(slot)), *counts)

    _around(patch, Slots, "commit", commit)


@_mutant
def counts_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """A window starts where the plan was sure of, not where the slot has come to (#45100)."""

    def gather(original: Any, rows: Rows, n_drafts: Any, slots: Slots, *rest: Any) -> Any:
        current = slots.committed.copy()
        slots.committed[rows.slot] = rows.len_lo
        try:
            return original(rows, n_drafts, slots, *rest)
        finally:
            slots.committed[:] = current

    _around(patch, product, "gather", gather)


@_mutant
def minus_one_as_an_id(patch: pytest.MonkeyPatch) -> None:
    """Places without a draft hold -1, and every window is as long as it may be (#39295)."""

    def propose(original: Any, self: Any, slot: Any, k_cap: Any) -> Any:
        ids, counts, _ = original(self, slot, k_cap)
        column = torch.arange(ids.shape[1])
        caps = torch.from_numpy(k_cap)
        return Drafts(torch.where(column < counts.unsqueeze(1), ids, -1), caps)

    _around(patch, drafting.Drafting, "_propose", propose)


@_mutant
def rejected_drafts_stay(patch: pytest.MonkeyPatch) -> None:
    """The committed length advances by what was drafted, not by what was accepted."""
    drafted = np.zeros(0, dtype=np.int64)

    def gather(original: Any, rows: Rows, n_drafts: Any, *rest: Any) -> Any:
        nonlocal drafted
        drafted = np.where(rows.mode == pb.VERIFY, 1 + n_drafts, 0)
        return original(rows, n_drafts, *rest)

    def commit(
        original: Any, self: Slots, step: int, slot: Any, folded: Any, consumed: Any, *rest: Any
    ) -> None:
        original(self, step, slot, folded, np.maximum(consumed, drafted), *rest)

    _around(patch, product, "gather", gather)
    _around(patch, Slots, "commit", commit)


@_mutant
def mode_guessed_from_token_counts(patch: pytest.MonkeyPatch) -> None:
    """Short rows are taken for decode windows, long ones for prompts (#36917)."""

    def read_rows(original: Any, plan: pb.StepPlan) -> Rows:
        rows: Rows = original(plan)
        width = np.maximum(rows.num_tokens, 1 + rows.max_drafts)
        guess = np.where(width == 1, pb.DECODE, np.where(width < 6, pb.VERIFY, rows.mode))
        return replace(rows, mode=guess)

    _around(patch, runner, "read_rows", read_rows)


@_mutant
def parameters_dropped_at_draft_positions(patch: pytest.MonkeyPatch) -> None:
    """Only the first position of a window is shaped by the request's parameters (#42744)."""

    def sample(original: Any, logits: Any, slot: Any, length: Any, tokens: Any, slots: Any) -> Any:
        sampled = original(logits, slot, length, tokens, slots)
        later = torch.zeros(len(slot), dtype=torch.bool)
        later[1:] = slot[1:] == slot[:-1]
        sampled.ids[later] = logits[later].argmax(dim=1)
        return sampled

    _around(patch, product, "sample", sample)


@_mutant
def history_without_drafts(patch: pytest.MonkeyPatch) -> None:
    """Penalties and bad words of a window see the committed tokens only (#33251)."""

    def sample(original: Any, logits: Any, slot: Any, length: Any, tokens: Any, slots: Any) -> Any:
        blind = tokens.clone()
        for row in range(1, len(slot)):
            if slot[row] == slot[row - 1]:
                blind[slot[row], length[row] - 1] = 0
        return original(logits, slot, length, blind, slots)

    _around(patch, product, "sample", sample)


@_mutant
def noise_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """Random draws are keyed by the place in the batch instead of the place in the text."""
    from surestep_worker.sampling import draw

    def gumbel(original: Any, logits: Any, seed: Any, position: Any, *ids: Any) -> Any:
        return original(logits, seed, torch.arange(len(position)), *ids)

    _around(patch, draw, "gumbel_argmax", gumbel)


@_mutant
def tokens_behind_a_stop_id(patch: pytest.MonkeyPatch) -> None:
    """A window goes on behind the stop id that ends its request (#56101)."""

    def verify(original: Any, *args: Any) -> Verdict:
        class Never:
            def contains(self, slot: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
                return torch.zeros_like(tokens, dtype=torch.bool)

        verdict: Verdict = original(*args[:-1], Never())
        return verdict

    _around(patch, product, "verify", verify)


@_mutant
def accepted_if_any_draft_equals(patch: pytest.MonkeyPatch) -> None:
    """A right draft behind a wrong one is accepted."""

    def verify(
        original: Any, sampled: Any, cu: Any, drafts: Any, n_drafts: Any, slot: Any, stops: Any
    ) -> Verdict:
        verdict: Verdict = original(sampled, cu, drafts, n_drafts, slot, stops)
        column = torch.arange(drafts.shape[1])
        equal = (verdict.tokens[:, :-1] == drafts) & (column < n_drafts.unsqueeze(1))
        more = torch.maximum(verdict.n_accepted, equal.sum(dim=1))
        grown = more > verdict.n_accepted
        return verdict._replace(
            n_accepted=more, n_emitted=torch.where(grown, more + 1, verdict.n_emitted)
        )

    _around(patch, product, "verify", verify)


RANK_MUTANTS: dict[str, Mutant] = {}  # put into one rank of several


def _rank_mutant(mutate: Mutant) -> Mutant:
    RANK_MUTANTS[mutate.__name__] = mutate
    return mutate


@_rank_mutant
def rank_local_gate(patch: pytest.MonkeyPatch) -> None:
    """A rank that is near its limit does not draft, while the others do (#49027, #44185)."""

    def draft(original: Any, self: Any, rows: Rows) -> Any:
        if self._slots.committed.max() < PERTURBED_LEN:
            return original(self, rows)
        return self._nothing(rows, skipped=False)

    _around(patch, drafting.Drafting, "_draft", draft)


@_rank_mutant
def one_bit_of_one_step(patch: pytest.MonkeyPatch) -> None:
    """The last bit of one hidden value is another than on the other ranks."""

    steps = itertools.count(1)

    def forward(original: Any, self: Any, gathered: Any) -> torch.Tensor:
        hidden: torch.Tensor = original(self, gathered)
        if next(steps) == PERTURBED_STEP:
            hidden.view(torch.int32)[0, 0] ^= 1
        return hidden

    _around(patch, product.HostStep, "_forward", forward)


@_rank_mutant
def half_of_all_captures_fail(patch: pytest.MonkeyPatch) -> None:
    """Every other one: which must not matter, and so is no bug."""
    captures = itertools.count(1)

    def capture(original: Any, self: Graphs, run: Any) -> Any:
        if next(captures) % 2 == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, run)

    _around(patch, Graphs, "_capture", capture)
