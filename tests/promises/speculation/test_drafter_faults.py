"""A drafter that fails costs its drafts: every request answers what it answers without one."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NoReturn
from zlib import crc32

import pytest
import torch
from support.parity.bench import CALM, NEIGHBOURS, Conditions, ParityBench
from support.parity.drafters import draft_again
from surestep_common.invariants import IntArray
from surestep_kernels.slot_state import SlotState
from surestep_kernels.table import STEP_REFERENCE, StepOps
from surestep_worker.cache.caches import Caches
from surestep_worker.drafters import DRAFTERS, DraftContext, Drafts
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.head import HeadDrafter, HeadSteps
from surestep_worker.drafters.inputs import DraftInputs
from surestep_worker.drafters.ngram import NgramDrafter
from surestep_worker.drafters.temperature import DraftTemperature
from surestep_worker.layers.context import StepBatch
from surestep_worker.models import DraftHead
from surestep_worker.models.draft_model import DraftModel
from surestep_worker.models.eagle3.head import Eagle3Head
from torch import Tensor

# Each drafter below wraps one that works, and fails by a hash of what it is asked, half done where
# it can.
FAILURES: Counter[str] = Counter()  # since the test emptied it


def _unlucky(kind: str, *what: Any) -> bool:
    """Return true one time in five."""
    unlucky = crc32(repr(what).encode()) % 5 == 0
    FAILURES[kind] += unlucky
    return unlucky


class _Broken(Exception):
    """Exception of a drafter."""


class _Faulty:
    """Ngram drafts, or a fault: an exception, a wrong id, or too many drafts."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        inner = DRAFTERS.get("ngram")(config, context)
        assert isinstance(inner, NgramDrafter)
        self._inner = inner

    def propose(self, tokens: torch.Tensor, *columns: torch.Tensor) -> Drafts:
        drafts, lengths = self._inner.propose(tokens, *columns), columns[1].tolist()
        if _unlucky("raised", "raise", *lengths):
            raise _Broken
        if _unlucky("wrong id", "id", *lengths):
            return drafts._replace(ids=drafts.ids - 10**6)
        if _unlucky("too many", "many", *lengths):
            return drafts._replace(counts=drafts.counts + 100)
        return drafts


DRAFTERS.register("faulty")(_Faulty)


class _FaultyHead(HeadDrafter):
    """The MTP head, or a fault of any of its parts, in the middle of its work."""

    def on_device(self, ops: StepOps, state: SlotState) -> HeadSteps:
        return _FaultyHeadSteps(self, self._context, ops, state)

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        if _unlucky("observed", slots.tolist(), n_accepted.tolist()):
            raise _Broken
        super().observe(slots, n_drafts, n_accepted)


class _FaultyHeadSteps(HeadSteps):
    def draft(self, rows: DraftInputs, *rest: Any) -> Drafts:
        drafted = super().draft(rows, *rest)
        if _unlucky("raised", "raise", *self._state.known[rows.slot.long()].tolist()):
            raise MemoryError
        return drafted

    def _catch_up(self, slots: Tensor, catch_up: Tensor, *rest: Any) -> None:
        if _unlucky("catch-up", "catch up", catch_up.tolist(), slots.tolist()):
            super()._catch_up(slots, (catch_up + 1) // 2, *rest)
            self._seed[slots] = torch.nan
            raise _Broken
        super()._catch_up(slots, catch_up, *rest)

    def _next(self, slots: Tensor, position: Tensor, *rest: Any) -> Tensor:
        out = super()._next(slots, position, *rest)
        if _unlucky("nan", "nan", *position.tolist()):
            out[0] = torch.nan
        return out


@DRAFTERS.register("faulty-mtp")
def _faulty_mtp(config: SpeculativeConfig, context: DraftContext) -> HeadDrafter:
    temperature = DraftTemperature(context.num_slots, config.draft_temperature)
    return _FaultyHead(context, temperature)


class _Hopeless:
    """Raises whenever it is asked."""

    def __init__(self, config: SpeculativeConfig, context: DraftContext) -> None:
        pass

    def propose(self, *columns: torch.Tensor) -> NoReturn:
        FAILURES["raised"] += 1
        raise _Broken


DRAFTERS.register("hopeless")(_Hopeless)


KINDS = {
    "faulty": ("raised", "wrong id", "too many"),
    "faulty-mtp": ("raised", "catch-up", "observed", "nan"),
}
WHERE = [name for name in NEIGHBOURS if name != "alone"]


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


@pytest.mark.parametrize(("drafter", "kind"), [("eagle3", Eagle3Head), ("draft_model", DraftModel)])
def test_a_drafter_that_fails_behind_a_position(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    kind: type[DraftHead],
) -> None:
    """Fail like one that was trained on short texts only, unseen by its check at the start."""
    right, broken = kind.forward, 0

    def forward(self: DraftHead, hidden: torch.Tensor, batch: StepBatch, caches: Any) -> Any:
        nonlocal broken
        out, far = right(self, hidden, batch, caches), batch.positions > 24
        broken += int(far.sum())
        return out.masked_fill(far.unsqueeze(1), torch.nan)

    monkeypatch.setattr(kind, "forward", forward)
    bench: ParityBench = request.getfixturevalue(f"{drafter}_bench")
    assert check(bench, drafter, "mixed", 1, Conditions(after_apply=draft_again)) > 0
    assert broken > 100


def test_blocks_that_fail_behind_a_position(
    dflash_bench: ParityBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts before the row that is not finite are drafted all the same."""
    head, broken = dflash_bench._model.draft_head, 0
    assert head is not None
    assert head.block is not None
    right = head.block.run

    def run(batch: StepBatch, caches: Caches) -> Tensor:
        nonlocal broken
        out, far = right(batch, caches), batch.positions > 24
        broken += int(far.sum())
        return out.masked_fill(far.unsqueeze(1), torch.nan)

    monkeypatch.setattr(head, "block", head.block._replace(run=run))
    conditions = Conditions(after_apply=draft_again, poison=True)
    assert check(dflash_bench, "dflash", "mixed", 1, conditions) > 0
    assert broken > 100
