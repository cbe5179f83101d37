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
from surestep_kernels.choose import Chosen
from surestep_kernels.commit_step import StopIds
from surestep_kernels.shape_logits import Positions
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import StepOps
from surestep_proto import worker_pb2 as pb
from surestep_worker.drafters.inputs import DraftInputs
from surestep_worker.step import runner
from surestep_worker.step.drafting import Drafting, Proposals
from surestep_worker.step.forward import ForwardPass
from surestep_worker.step.graphs import Graphs
from surestep_worker.step.plan import Rows
from surestep_worker.step.slots import Slots
from surestep_worker.step.step import StepLauncher

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


def _around_op(patch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """Replace an op of steps by `change(original, *args, **kwargs)`."""

    def build(original: Any, self: StepLauncher, parts: Any, ops: StepOps) -> None:
        op = getattr(ops, name)
        changed: dict[str, Any] = {name: lambda *a, **kw: change(op, *a, **kw)}
        original(self, parts, replace(ops, **changed))

    _around(patch, StepLauncher, "__init__", build)


@_mutant
def counts_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """Accepted counts are kept by row of the batch instead of by slot (#45100, #41190)."""

    def commit(original: Any, self: Slots, step: int, slot: Any, *counts: Any) -> None:
        original(self, step, np.arange(len(slot)), *counts)

    _around(patch, Slots, "commit", commit)


@_mutant
def counts_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """A window starts where the plan was sure of, not where the slot has come to (#45100)."""
    sure = torch.zeros(0, dtype=torch.int32)

    def run(original: Any, self: StepLauncher, rows: Rows, *rest: Any) -> Any:
        nonlocal sure
        sure = torch.from_numpy(rows.len_lo).int()
        return original(self, rows, *rest)

    def gather(original: Any, rows: StepRows, drafts: Any, state: SlotState, *rest: Any) -> Any:
        current = state.committed.clone()
        state.committed[rows.slot.long()] = sure
        try:
            return original(rows, drafts, state, *rest)
        finally:
            state.committed.copy_(current)

    _around(patch, StepLauncher, "_run", run)
    _around_op(patch, "gather_step", gather)


@_mutant
def minus_one_as_an_id(patch: pytest.MonkeyPatch) -> None:
    """Places without a draft hold -1, and every window is as long as it may be (#39295)."""

    def checked(original: Any, self: Any, slot: Any, max_drafts: torch.Tensor) -> Any:
        drafts = original(self, slot, max_drafts)
        column = torch.arange(drafts.ids.shape[1])
        ids = torch.where(column < drafts.counts.unsqueeze(1), drafts.ids, -1)
        return drafts._replace(ids=ids, counts=max_drafts)

    _around(patch, Proposals, "_checked", checked)


@_mutant
def rejected_drafts_stay(patch: pytest.MonkeyPatch) -> None:
    """The committed length advances by what was drafted, not by what was accepted."""

    def commit(
        original: Any, rows: StepRows, drafts: DraftIds, chosen: Any, stops: Any, state: SlotState
    ) -> Any:
        slot = rows.slot.long()
        drafted = state.committed[slot] + (1 + drafts.counts) * (drafts.counts > 0)
        report = original(rows, drafts, chosen, stops, state)
        state.committed[slot] = torch.maximum(state.committed[slot], drafted)
        return report

    _around_op(patch, "commit_step", commit)


@_mutant
def mode_guessed_from_token_counts(patch: pytest.MonkeyPatch) -> None:
    """Short rows are taken for decode windows, long ones for prompts (#36917)."""

    def read_rows(original: Any, plan: pb.StepPlan) -> Rows:
        rows: Rows = original(plan)
        width = np.maximum(rows.num_tokens, 1 + rows.max_drafts)
        guess = np.where(width == 1, pb.DECODE, np.where(width < 6, pb.VERIFY, rows.mode))
        return replace(rows, mode=guess)

    _around(patch, runner, "read_rows", read_rows)


def _behind_the_first(window: torch.Tensor) -> torch.Tensor:
    """Which positions of windows [N] have drafts in front of them."""
    later = torch.zeros(len(window), dtype=torch.bool)
    later[1:] = window[1:] == window[:-1]
    return later


@_mutant
def parameters_dropped_at_draft_positions(patch: pytest.MonkeyPatch) -> None:
    """Only the first position of a window is shaped by the request's parameters (#42744)."""

    def shape(original: Any, z: torch.Tensor, positions: Positions, shaping: Any) -> None:
        later = _behind_the_first(positions.window)
        raw = z[later]
        original(z, positions, shaping)
        z[later] = raw

    def choose(
        original: Any, z: torch.Tensor, window: torch.Tensor, *rest: Any, **asked: Any
    ) -> Any:
        chosen, later = original(z, window, *rest, **asked), _behind_the_first(window)
        chosen.ids[later] = z[later].argmax(dim=1).int()
        return chosen

    _around_op(patch, "shape_logits", shape)
    _around_op(patch, "choose", choose)


@_mutant
def history_without_drafts(patch: pytest.MonkeyPatch) -> None:
    """Penalties and bad words of a window see the committed tokens only (#33251)."""

    def shape(original: Any, z: torch.Tensor, positions: Positions, shaping: Any) -> None:
        blind, later = positions.tokens.clone(), _behind_the_first(positions.window)
        blind[positions.slot[later].long(), positions.length[later].long() - 1] = 0
        original(z, positions._replace(tokens=blind), shaping)

    _around_op(patch, "shape_logits", shape)


@_mutant
def noise_by_batch_row(patch: pytest.MonkeyPatch) -> None:
    """Random draws are keyed by the place in the batch instead of the place in the text."""

    def choose(original: Any, z: Any, window: Any, length: Any, *rest: Any, **asked: Any) -> Any:
        return original(z, window, torch.arange(len(length)).int(), *rest, **asked)

    _around_op(patch, "choose", choose)


@_mutant
def tokens_behind_a_stop_id(patch: pytest.MonkeyPatch) -> None:
    """A window goes on behind the stop id that ends its request (#56101)."""

    def commit(
        original: Any, rows: Any, drafts: Any, chosen: Any, stops: StopIds, *rest: Any
    ) -> Any:
        none = StopIds(torch.zeros_like(stops.cu), stops.ids[:0])
        return original(rows, drafts, chosen, none, *rest)

    _around_op(patch, "commit_step", commit)


@_mutant
def accepted_if_any_draft_equals(patch: pytest.MonkeyPatch) -> None:
    """A right draft behind a wrong one is accepted, and the wrong one with it."""

    def commit(original: Any, rows: StepRows, drafts: DraftIds, chosen: Chosen, *rest: Any) -> Any:
        ids = chosen.ids.clone()
        for row, window in enumerate(rows.window.tolist()):
            drafted = drafts.ids[row, : drafts.counts[row]]
            begin = int(rows.cu_windows[window]) if len(drafted) else 0
            right = (ids[begin : begin + len(drafted)] == drafted).nonzero()
            if len(right):
                end = int(right.max()) + 1
                ids[begin : begin + end] = drafted[:end]
        return original(rows, drafts, chosen._replace(ids=ids), *rest)

    _around_op(patch, "commit_step", commit)


RANK_MUTANTS: dict[str, Mutant] = {}  # put into one rank of several


def _rank_mutant(mutate: Mutant) -> Mutant:
    RANK_MUTANTS[mutate.__name__] = mutate
    return mutate


@_rank_mutant
def rank_local_gate(patch: pytest.MonkeyPatch) -> None:
    """A rank that is near its limit does not draft, while the others do (#49027, #44185)."""

    def run(original: Any, self: Drafting, sent: DraftInputs, shape: Any) -> Any:
        if self._state.committed.max() < PERTURBED_LEN:
            return original(self, sent, shape)
        return self.nothing(len(sent.slot))

    _around(patch, Drafting, "run", run)


@_rank_mutant
def one_bit_of_one_step(patch: pytest.MonkeyPatch) -> None:
    """The last bit of one hidden value is another than on the other ranks."""

    steps = itertools.count(1)

    def forward(original: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, choices = original(*args)
        if next(steps) == PERTURBED_STEP:
            hidden.view(torch.int32)[0, 0] ^= 1
        return hidden, choices

    _around(patch, ForwardPass, "_forward", forward)


@_rank_mutant
def no_captures(patch: pytest.MonkeyPatch) -> None:
    """No capture succeeds: after three none is tried, which the other rank does not know."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    patch.setattr(Graphs, "_capture", refuse)


@_rank_mutant
def half_of_all_captures_fail(patch: pytest.MonkeyPatch) -> None:
    """Every other one: which must not matter, and so is no bug."""
    captures = itertools.count(1)

    def capture(original: Any, self: Graphs, run: Any) -> Any:
        if next(captures) % 2 == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, run)

    _around(patch, Graphs, "_capture", capture)
