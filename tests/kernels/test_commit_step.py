"""What a step emits and leaves in the slots; after gather_step, on slots of all kinds."""

from __future__ import annotations

import pytest
import torch
from support.kernels.slots import (
    BLOCK_SIZE,
    VOCAB,
    K,
    bounds,
    copied,
    i32,
    make_state,
    make_step,
    randint,
    random_rows,
    random_state,
)
from surestep_kernels import KernelSet
from surestep_kernels.choose import Chosen, RowStatus
from surestep_kernels.commit_step import Report, StopIds
from surestep_kernels.slot_state import DraftIds
from torch import Tensor


@pytest.mark.parametrize("seed", range(6))
def test_commits_what_the_reference_commits(
    column: KernelSet, reference: KernelSet, seed: int
) -> None:
    """Windows accepted whole, in part, not at all; cut by stop ids; with bad positions."""
    torch.manual_seed(seed)
    state, step = make_state(), make_step()
    ids = randint(0, VOCAB, 14)
    ids[2 : 2 + K] = step.drafts.ids[3]
    ids[6] = step.drafts.ids[4, 0]
    if seed == 1:
        ids[3] += 1
    status = torch.full((14,), int(RowStatus.OK), dtype=torch.int32)
    if seed in (2, 3):
        status[1 + seed] = RowStatus.NON_FINITE
    if seed == 4:
        status[[0, 2]] = RowStatus.NO_CANDIDATE
    stops = StopIds(i32(0, 1, 1, 3, 3, 3), i32(7, int(ids[3]), 9) if seed == 5 else i32(7, 8, 9))
    results = list[tuple[Tensor, ...]]()
    for kernels in (reference, column):
        there = copied(state)
        report = kernels.step.commit_step(*step, Chosen(ids, status), stops, there)
        results.append((report, *there))
    facts = Report.of(results[0][0])
    emitted = {0: 4, 1: 2, 2: 1, 3: 2, 4: 0, 5: 2}[seed]
    assert facts.n_emitted.tolist() == [0, int(seed != 4), 1, emitted, 2, 0]
    assert facts.n_accepted[3] == {0: 3, 5: 2}.get(seed, max(emitted - 1, 0))
    for wanted, actual in zip(*results, strict=True):
        if wanted is results[0][0]:  # columns behind the emitted tokens mean nothing
            keep = torch.arange(K + 1) < facts.n_emitted.unsqueeze(1)
            assert torch.equal(actual[:, : -K - 1], wanted[:, : -K - 1])
            assert torch.equal(actual[:, -K - 1 :][keep], wanted[:, -K - 1 :][keep])
        else:
            assert torch.equal(actual, wanted)


def test_a_step_of_prompts_alone_has_no_window(column: KernelSet, reference: KernelSet) -> None:
    state, step, none = make_state(), make_step(), i32()
    rows = step.rows._replace(
        advances=torch.ones_like(step.rows.advances),
        window=torch.full_like(step.rows.window, -1),
        position_row=none,
        position_offset=none,
        cu_windows=i32(0),
    )
    drafts = DraftIds(step.drafts.ids, torch.zeros_like(step.drafts.counts))
    stops, chosen = StopIds(i32(0), none), Chosen(none, none)
    expected, actual = copied(state), copied(state)
    wanted = reference.step.commit_step(rows, drafts, chosen, stops, expected)
    report = column.step.commit_step(rows, drafts, chosen, stops, actual)
    assert torch.equal(report[:, : -K - 1], wanted[:, : -K - 1])
    assert torch.equal(actual.committed, expected.committed)
    assert (expected.committed[:6] > state.committed[:6]).sum() == 5  # all but slot 3


@pytest.mark.parametrize(
    ("column", "num_rows"),
    [*(("c", n) for n in (0, 1, 2, 31, 300)), ("triton", 1), ("triton", 31)],
    indirect=["column"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_gathered_and_committed(
    column: KernelSet, reference: KernelSet, num_rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    state = random_state(num_rows)
    rows, counts = random_rows(num_rows)
    drafts = DraftIds(randint(0, 13, num_rows, K), counts)
    positions, windows = len(rows.position_row), len(rows.cu_windows) - 1
    chosen = Chosen(randint(0, 13, positions), randint(-4, 3, positions).clamp(min=1))
    stops = StopIds(bounds(randint(0, 3, windows)), randint(0, 13, 2 * windows))
    results = list[list[Tensor]]()
    for ops in (reference.step, column.step):
        mine, error = copied(state), torch.zeros(1, dtype=torch.int32)
        inputs = ops.gather_step(rows, drafts, mine, error, BLOCK_SIZE, 50)
        report = Report.of(ops.commit_step(rows, drafts, chosen, stops, mine))
        emitted = torch.arange(K + 1) < report.n_emitted.unsqueeze(1)
        tokens = torch.where(emitted, report.tokens, -1)
        results.append([*inputs, *mine, *report[:-1], tokens, error])
    for wanted, actual in zip(*results, strict=True):
        assert actual.dtype is wanted.dtype
        assert torch.equal(actual, wanted)
