"""The ops of a step in C at all sizes, on random slots: bit by bit what the references leave."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernels.draw_params import OFF, make_params
from surestep_kernels.choose import Chosen
from surestep_kernels.commit_step import Report, StopIds
from surestep_kernels.shape_logits import Biases, Forbidden, Masks, Penalties, Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import STEP_REFERENCE, StepOps
from torch import Tensor

WIDTH, PAGES, BLOCK_SIZE, VOCAB, K, GROUPS = 70, 10, 8, 13, 3, 3
SIZES = [0, 1, 2, 31, 300]


def randint(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32)


def bounds(counts: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1), counts.cumsum(0))).int()


def copied(tensors: Any) -> Any:
    return type(tensors)(*(tensor.clone() for tensor in tensors))


def make_state(num_rows: int) -> SlotState:
    lines = num_rows + 3
    committed, upto = randint(0, 60, lines), randint(0, 60, lines)
    committed[-1] = upto[-1] = 0  # the NULL slot holds nothing
    return SlotState(
        tokens=randint(0, VOCAB, lines, WIDTH),
        block_tables=randint(0, 50, GROUPS, lines, PAGES),
        committed=committed,
        known=committed + 1,
        folded=committed - randint(0, 4, lines).minimum(committed),
        drafter_len=upto,
    )


def make_rows(num_rows: int) -> tuple[StepRows, Tensor]:
    """Rows of prompts, of windows, or of padding, and how many drafts each has."""
    lines, advances = num_rows + 3, randint(0, 2, num_rows)
    width = torch.where(advances > 0, randint(1, 7, num_rows), 1 + K)
    slot = torch.randperm(lines - 1)[:num_rows].int()
    slot[::5] = lines - 1
    sampled = (advances == 0) | (randint(0, 2, num_rows) > 0)
    window = torch.where(sampled, sampled.cumsum(0) - 1, -1).int()
    positions = torch.where(advances > 0, 1, 1 + K)[sampled]
    row = torch.arange(num_rows, dtype=torch.int32)
    position_row = row[sampled].repeat_interleave(positions)
    cu_windows = bounds(positions)
    offset = torch.arange(len(position_row)) - cu_windows[:-1].long().repeat_interleave(positions)
    rows = StepRows(
        slot=slot,
        cu_rows=bounds(width),
        advances=advances,
        snapshot_len=randint(0, 60, num_rows),
        snapshot_line=randint(0, 3, num_rows),
        chunked=torch.zeros(num_rows, dtype=torch.int32),
        catch_up=randint(0, 9, num_rows),
        window=window,
        token_row=row.repeat_interleave(width),
        position_row=position_row,
        position_offset=offset.int(),
        cu_windows=cu_windows,
    )
    return rows, torch.where((advances > 0) | (slot == lines - 1), 0, randint(0, K + 1, num_rows))


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_gathered_and_committed(native_step: StepOps, num_rows: int, seed: int) -> None:
    torch.manual_seed(seed)
    state = make_state(num_rows)
    rows, counts = make_rows(num_rows)
    drafts = DraftIds(randint(0, VOCAB, num_rows, K), counts)
    positions, windows = len(rows.position_row), len(rows.cu_windows) - 1
    chosen = Chosen(randint(0, VOCAB, positions), randint(-4, 3, positions).clamp(min=1))
    stops = StopIds(bounds(randint(0, 3, windows)), randint(0, VOCAB, 2 * windows))
    results = list[list[Tensor]]()
    for ops in (STEP_REFERENCE, native_step):
        mine, error = copied(state), torch.zeros(1, dtype=torch.int32)
        inputs = ops.gather_step(rows, drafts, mine, error, BLOCK_SIZE, 50)
        report = Report.of(ops.commit_step(rows, drafts, chosen, stops, mine))
        emitted = torch.arange(K + 1) < report.n_emitted.unsqueeze(1)
        tokens = torch.where(emitted, report.tokens, -1)
        results.append([*inputs, *mine, *report[:-1], tokens, error])
    for reference, actual in zip(*results, strict=True):
        assert actual.dtype is reference.dtype
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 577])
def test_fingerprints_at_all_widths(native_step: StepOps, width: int, dtype: torch.dtype) -> None:
    rows, counts = make_rows(9)
    hidden = torch.randn(len(rows.position_row) + 4, width).to(dtype)
    expected = STEP_REFERENCE.fingerprint(hidden, rows, counts)
    assert torch.equal(native_step.fingerprint(hidden, rows, counts), expected)
    sliced = torch.cat((hidden, hidden), dim=1)[:, :width]
    assert torch.equal(native_step.fingerprint(sliced, rows, counts), expected)


@pytest.mark.parametrize("vocab", [21, 64, 75])
@pytest.mark.parametrize("count", SIZES)
def test_logits_are_shaped(native_step: StepOps, count: int, vocab: int) -> None:
    """Ids of biases in no order, long histories of few tokens, sequences of any length."""
    index = torch.arange(count, dtype=torch.int32)
    at = Positions(index, index, randint(0, WIDTH + 1, count), randint(-2, VOCAB, count + 1, WIDTH))
    listed = torch.stack([torch.randperm(vocab)[:3] for _ in range(count + 1)]).int().flatten()
    sequences = bounds(torch.full((count,), 2))
    words = torch.randint(-(1 << 31), 1 << 31, ((count + 1) // 2, -(-vocab // 32))).int()
    words[1::3], words[2::3] = 0, -1  # whole words are done at once
    cu_ids = bounds(randint(1, 4, 2 * count + 1))
    shaping = Shaping(
        Biases(index, sequences, listed, torch.randn(len(listed)) * 9,
               randint(0, 2, count)),
        Penalties(index, randint(0, WIDTH, count), torch.rand(count) + 0.5, torch.randn(count),
                  torch.randn(count)),
        Forbidden(index, sequences, cu_ids, randint(0, VOCAB, int(cu_ids[-1])),
                  randint(0, 2 * WIDTH, 2 * count + 1), randint(0, WIDTH, count)),
        Masks(index[::2].contiguous(), words),
    )  # fmt: skip
    z = torch.randn(count, vocab)
    z[:, 7], z[::3, 5], z[::4, 2] = 3e38, math.nan, math.inf
    expected, actual = z.clone(), z.clone()
    STEP_REFERENCE.shape_logits(expected, at, shaping)
    native_step.shape_logits(actual, at, shaping)
    actual[actual.isposinf()] = math.nan  # of these two a logit that nobody asks about may be any
    assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 33, 1025])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_tokens_are_chosen(native_step: StepOps, count: int, vocab: int) -> None:
    rules = [
        OFF,
        {**OFF, "top_k": 3},
        {**OFF, "top_p": 0.7},
        {"min_p": 0.1, "top_k": 5, "top_p": 0.9},
    ]
    params = make_params([(t, rule) for t in (0.0, 0.7, 1e30) for rule in rules], vocab)
    params = params._replace(top_k=params.top_k.clamp(max=vocab))
    z, window = torch.randn(count, vocab).mul(3).round(), randint(0, 12, count)
    length = randint(0, 1 << 30, count)
    chosen = native_step.choose(z, window, length, params, random=True, truncated=True)
    if count == 0:
        assert [len(column) for column in chosen] == [0, 0]
        return
    expected = STEP_REFERENCE.choose(z, window, length, params, random=True, truncated=True)
    assert torch.equal(chosen.ids, expected.ids)
    assert torch.equal(chosen.status, expected.status)


def test_a_choice_does_not_depend_on_threads_and_neighbours(
    native_step: StepOps, native: Any
) -> None:
    params = make_params([(0.8, {**OFF, "top_p": 0.9})] * 50, 3000)
    z, window = torch.randn(50, 3000), torch.arange(50, dtype=torch.int32)
    native.set_num_threads(3)
    together = native_step.choose(z, window, window, params, random=True, truncated=True).ids
    native.set_num_threads(1)
    for n in range(50):
        only = window[n : n + 1]
        alone = native_step.choose(z[n : n + 1], only, only, params, random=True, truncated=True)
        assert alone.ids.item() == together[n]
