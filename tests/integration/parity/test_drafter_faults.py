"""A drafter that fails costs its drafts: every request answers what it answers without one."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.parity.bench import CALM, NEIGHBOURS, Conditions, ParityBench
from support.parity.faulty_drafters import FAILURES
from surestep_kernels.table import STEP_REFERENCE
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.speculation.speculation import Alarm
from surestep_worker.layers.context import StepBatch
from surestep_worker.models.eagle3.head import Eagle3Head

KINDS = {
    "faulty": ("raised", "wrong id", "too many"),
    "faulty-mtp": ("raised", "catch-up", "observed", "nan"),
}
WHERE = [name for name in NEIGHBOURS if name != "alone"]


def draft_again(state: SchedulerState) -> None:
    """No pause after a fault, so that there are many."""
    state.speculation.alarm = Alarm()


def check(bench: ParityBench, drafter: str, where: str, depth: int, conditions: Conditions) -> int:
    """Serve everything; the number of drafts verified."""
    answers = bench.run(where, drafter=drafter, k=3, depth=depth, conditions=conditions)
    for name, expected in bench.expected.items():
        got = answers[name]
        assert got.error is None, f"{name}: {got.error}"
        assert got.token_ids == expected.token_ids, name
        assert got.logprobs == expected.logprobs, name
        assert got.finish == expected.finish, name
    return sum(answer.num_drafts for answer in answers.values())


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.rotates(2)
def test_faults_change_nothing(hybrid_bench: ParityBench, drafter: str, depth: int) -> None:
    FAILURES.clear()
    where = WHERE[depth % len(WHERE)]
    conditions = Conditions(shuffle_seed=1 + depth, poison=True, after_apply=draft_again)
    assert check(hybrid_bench, drafter, where, depth, conditions)
    assert all(FAILURES[kind] for kind in KINDS[drafter]), FAILURES


def test_faults_on_a_device_change_nothing(bench: ParityBench) -> None:
    """Wrong ids and too many of them are cut off there, nobody has to be told."""
    FAILURES.clear()
    conditions = Conditions(step_ops=STEP_REFERENCE, poison=True, after_apply=draft_again)
    assert check(bench, "faulty", "mixed", 1, conditions)
    assert all(FAILURES[kind] for kind in KINDS["faulty"]), FAILURES


def test_a_hopeless_drafter_is_left_alone(
    bench: ParityBench, caplog: pytest.LogCaptureFixture
) -> None:
    FAILURES.clear()
    with caplog.at_level(logging.WARNING):
        assert check(bench, "hopeless", "mixed", 1, CALM) == 0
    assert FAILURES["raised"] == 1
    assert "speculation is suspended: the drafter failed" in caplog.text
    assert "_Broken" in caplog.text


def test_a_head_that_fails_behind_a_position(
    eagle3_bench: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was trained on short texts only: its check at the start sees nothing of it."""
    right, broken = Eagle3Head.forward, 0

    def forward(self: Eagle3Head, hidden: torch.Tensor, batch: StepBatch, caches: Any) -> Any:
        nonlocal broken
        out, far = right(self, hidden, batch, caches), batch.positions > 24
        broken += int(far.sum())
        return out.masked_fill(far.unsqueeze(1), torch.nan)

    monkeypatch.setattr(Eagle3Head, "forward", forward)
    conditions = Conditions(after_apply=draft_again)
    assert check(eagle3_bench, "eagle3", "mixed", 1, conditions) > 0
    assert broken > 100
