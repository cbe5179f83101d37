"""The ops that keep a step on its device: Triton and C against the references, on random slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.kernels.step_column import StepColumn
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels.choose import Chosen, RowStatus
from surestep_kernels.commit_step import Report, StopIds
from surestep_kernels.shape_logits import Biases, Forbidden, Masks, Penalties, Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import STEP_REFERENCE, StepOps
from surestep_kernels.write_runs import Runs
from torch import Tensor

SLOTS, WIDTH, PAGES, BLOCK_SIZE, BLOCKS, VOCAB, K = 6, 90, 12, 8, 60, 1100, 3


def moved(tree: Any, device: str) -> Any:
    """The same named tuples with copies of their tensors on the device."""
    if isinstance(tree, Tensor):
        return tree.clone().to(device)
    return type(tree)(*(moved(x, device) for x in tree)) if isinstance(tree, tuple) else tree


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randint(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def make_state() -> SlotState:
    """Slots of 20 to 40 committed tokens, one more known; the NULL slot is empty."""
    committed = randint(20, 40, SLOTS + 1)
    committed[-1] = 0
    some = [torch.randperm(BLOCKS - 1)[: SLOTS * 9].view(SLOTS, 9) for _ in range(2)]
    blocks = torch.stack(some).int() + 1
    tables = torch.full((2, SLOTS + 1, PAGES), NULL_BLOCK, dtype=torch.int32)
    tables[:, :SLOTS, :9] = blocks
    return SlotState(
        tokens=randint(0, VOCAB, SLOTS + 1, WIDTH),
        block_tables=tables,
        committed=committed,
        known=committed + 1,
        folded=committed - randint(0, 4, SLOTS + 1).minimum(committed),
        drafter_len=(committed - 5).clamp(min=0),
    )


class Step(NamedTuple):
    rows: StepRows
    drafts: DraftIds


def make_step() -> Step:
    """A prompt's part, its last part, a decode row, two windows, and one of padding."""
    width = [7, 5, 1, 1 + K, 1 + K, 1 + K]
    cu = [0, *torch.tensor(width).cumsum(0).tolist()]
    windows = [1, 1, 1 + K, 1 + K, 1 + K]  # of rows 1 to 5
    cu_windows = [0, *torch.tensor(windows).cumsum(0).tolist()]
    rows = StepRows(
        slot=i32(4, 0, 2, 1, 5, SLOTS),
        cu_rows=i32(*cu),
        advances=i32(1, 1, 0, 0, 0, 0),
        snapshot_len=i32(0, 1 << 20, 0, 0, 0, 0),
        snapshot_line=i32(0, 1, 0, 0, 0, 0),
        chunked=i32(0, 0, 0, 0, 0, 0),
        catch_up=i32(0, 3, 9, 0, 5, 0),
        window=i32(-1, 0, 1, 2, 3, 4),
        token_row=torch.arange(6, dtype=torch.int32).repeat_interleave(torch.tensor(width)),
        position_row=i32(1, 2, *[3] * (1 + K), *[4] * (1 + K), *[5] * (1 + K)),
        position_offset=i32(0, 0, *range(1 + K), *range(1 + K), *range(1 + K)),
        cu_windows=i32(*cu_windows),
    )
    return Step(rows, DraftIds(randint(0, VOCAB, 6, K), i32(0, 0, 0, K, 1, 0)))


def gathered(ops: StepOps, state: SlotState, step: Step, device: str) -> tuple[Any, ...]:
    """What gather_step leaves, on the CPU."""
    error = torch.zeros(1, dtype=torch.int32, device=device)
    state, step = moved(state, device), moved(step, device)
    inputs = ops.gather_step(*step, state, error, BLOCK_SIZE, BLOCKS)
    return tuple(moved(x, "cpu") for x in (*inputs, *state, error))


def test_gathers_what_the_reference_gathers(column: StepColumn) -> None:
    ops, device = column
    state, step = make_state(), make_step()
    state.folded[0] = state.committed[0] - 2
    step.rows.snapshot_len[1] = state.committed[0] + 1  # within the row
    expected = gathered(STEP_REFERENCE, state, step, "cpu")
    assert expected[-1].item() == 0
    assert expected[4].tolist() == [7, 5, 1, 1 + K, 2, 0]  # valid
    assert expected[7].tolist() == [0, 3, 0, 0, 0, 0]  # snapshot_after
    for actual, reference in zip(gathered(ops, state, step, device), expected, strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("wrong", ["slot", "block", "length"])
def test_what_does_not_exist_is_told_and_not_touched(column: StepColumn, wrong: str) -> None:
    state, step = make_state(), make_step()
    if wrong == "slot":
        step.rows.slot[3] = 1 << 30
    if wrong == "block":
        state.block_tables[1, 2] = BLOCKS
    if wrong == "length":
        state.committed[5] = state.known[5] = -5
    for ops, device in ((STEP_REFERENCE, "cpu"), column):
        inputs = gathered(ops, state, step, device)
        assert inputs[-1].item() == 1
        assert 0 <= int(inputs[2].min()) <= int(inputs[2].max()) < BLOCKS * BLOCK_SIZE
        assert 0 <= int(inputs[5].min()) <= int(inputs[5].max()) <= SLOTS


@pytest.mark.parametrize("seed", range(6))
def test_commits_what_the_reference_commits(column: StepColumn, seed: int) -> None:
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
    for ops, device in ((STEP_REFERENCE, "cpu"), column):
        there = moved(state, device)
        rows, drafts = moved(step, device)
        chosen = moved(Chosen(ids, status), device)
        report = ops.commit_step(rows, drafts, chosen, moved(stops, device), there)
        results.append(tuple(moved(x, "cpu") for x in (report, *there)))
    facts = Report.of(results[0][0])
    emitted = {0: 4, 1: 2, 2: 1, 3: 2, 4: 0, 5: 2}[seed]
    assert facts.n_emitted.tolist() == [0, int(seed != 4), 1, emitted, 2, 0]
    assert facts.n_accepted[3] == {0: 3, 5: 2}.get(seed, max(emitted - 1, 0))
    for reference, actual in zip(*results, strict=True):
        if reference is results[0][0]:  # columns behind the emitted tokens mean nothing
            keep = torch.arange(K + 1) < facts.n_emitted.unsqueeze(1)
            assert torch.equal(actual[:, : -K - 1], reference[:, : -K - 1])
            assert torch.equal(actual[:, -K - 1 :][keep], reference[:, -K - 1 :][keep])
        else:
            assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [0, 5])
def test_the_fingerprint_is_of_all_bits_but_those_of_padding(
    column: StepColumn, dtype: torch.dtype, prompt: int
) -> None:
    ops, device = column
    step, valid = make_step(), i32(7, 5, 1, 1 + K, 2, 0)
    count = len(step.rows.position_row)
    hidden = torch.randn(count + prompt, 1500).to(dtype)
    hidden[5, 7] = torch.nan
    rows, there, lengths = moved(step.rows, device), hidden.to(device), valid.to(device)
    expected = STEP_REFERENCE.fingerprint(hidden, step.rows, valid)
    assert torch.equal(ops.fingerprint(there, rows, lengths).cpu(), expected)
    there[count - 1] = 7  # padding
    assert torch.equal(ops.fingerprint(there, rows, lengths).cpu(), expected)
    there[0, 1499] += 1
    assert not torch.equal(ops.fingerprint(there, rows, lengths).cpu(), expected)


def test_a_step_of_prompts_alone_has_no_window(column: StepColumn) -> None:
    ops, device = column
    state, step, none = make_state(), make_step(), i32()
    rows = step.rows._replace(
        advances=torch.ones_like(step.rows.advances), window=torch.full_like(step.rows.window, -1),
        position_row=none, position_offset=none, cu_windows=i32(0),
    )  # fmt: skip
    drafts = DraftIds(step.drafts.ids, torch.zeros_like(step.drafts.counts))
    stops, chosen = StopIds(i32(0), none), Chosen(none, none)
    expected, actual = moved(state, "cpu"), moved(state, device)
    reference = STEP_REFERENCE.commit_step(rows, drafts, chosen, stops, expected)
    there, chosen = moved(Step(rows, drafts), device), moved(chosen, device)
    report = ops.commit_step(there.rows, there.drafts, chosen, moved(stops, device), actual)
    assert torch.equal(report.cpu()[:, : -K - 1], reference[:, : -K - 1])
    assert torch.equal(actual.committed.cpu(), expected.committed)
    assert (expected.committed[:6] > state.committed[:6]).sum() == 5  # all but slot 3


def test_writes_runs_and_nothing_else(column: StepColumn) -> None:
    ops, device = column
    memory = torch.arange(5000, dtype=torch.int32)
    lengths = [1, 1500, 0, 37]
    words = randint(0, 1 << 30, sum(lengths))
    runs = Runs(i32(0, 2000, 3900, 4000), i32(0, 1, 1501, 1501, 1538), words, max(lengths))
    expected, actual = memory.clone(), memory.to(device)
    STEP_REFERENCE.write_runs(expected, runs)
    ops.write_runs(actual, moved(runs, device))
    assert torch.equal(actual.cpu(), expected)
    assert (expected[4000:4037] == words[-37:]).all()


def allowing(*ids: int) -> torch.Tensor:
    """A line of Masks that allows these tokens; bits behind the vocabulary are of no meaning."""
    bits = torch.zeros(-(-VOCAB // 32) * 32, dtype=torch.bool)
    bits[list(ids)], bits[VOCAB:] = True, True
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int32).copy())


def make_shaping() -> Shaping:
    """Three windows of two positions; each wish is that of two windows."""
    values, never = torch.randn(5), torch.iinfo(torch.int32).max
    positions = i32(0, 1, 4, 5)
    return Shaping(
        Biases(positions, i32(0, 2, 2, 5), i32(3, 1099, 0, 5, 6), values, i32(0, 0, 1)),
        Penalties(
            positions, i32(4, 9, 30), torch.tensor([1.3, 1.0, 0.7]), torch.tensor([0.5, 0.0, 1.1]),
            torch.tensor([0.9, 0.0, -0.3]),
        ),
        Forbidden(
            i32(2, 3, 4, 5), i32(0, 0, 2, 4), i32(0, 1, 3, 6, 7), i32(11, 21, 12, 21, 22, 5, 14),
            i32(25, never, never, 10), i32(4, 9, 30),
        ),
        Masks(i32(3, 4), torch.stack((allowing(*range(0, VOCAB, 3)), allowing(5, 6, 17)))),
    )  # fmt: skip


def test_shapes_logits_as_the_reference_does(column: StepColumn) -> None:
    ops, device = column
    tokens = randint(0, VOCAB, SLOTS + 1, WIDTH)
    tokens[2, 23], tokens[3, 38:40] = 21, i32(21, 22)
    where = Positions(
        i32(0, 0, 1, 1, 2, 2), i32(1, 1, 2, 2, 3, 3), i32(20, 21, 24, 25, 40, 41), tokens
    )
    z = torch.randn(6, VOCAB)
    z[1, 50], z[5, 13], z[2, 11], z[4, 60] = torch.nan, torch.inf, torch.nan, -torch.inf
    shaping = make_shaping()
    expected, actual = z.clone(), z.to(device)
    STEP_REFERENCE.shape_logits(expected, where, shaping)
    ops.shape_logits(actual, moved(where, device), moved(shaping, device))
    assert torch.equal(actual.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().nonzero().tolist() == [[1, 50], [2, 11], [5, 13]]
    assert expected[2, 12] == -torch.inf  # 21 stands in front of it
    assert expected[3, 12] == z[3, 12]
    assert expected[4, 5] == -torch.inf  # 21 and 22 stand in front of it
    assert (expected[4:] > -torch.inf).sum(dim=1).tolist() == [1, 3]  # one of the two is masked
    assert (expected[3] > -torch.inf).nonzero().flatten().tolist() == list(range(0, VOCAB, 3))
