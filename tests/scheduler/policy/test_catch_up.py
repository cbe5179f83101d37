"""A drafter with state is caught up before it drafts, and never where it does not draft."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_common.invariants import DECODE, VERIFY, LedgerError, PlanRows, drafter_watermark
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule

MODEL = FakeModel(drafter_has_state=True, max_step_tokens=32)
PROMPT = [i % 100 for i in range(70)]


def modes_and_catch_up(loop: FakeLoop) -> list[tuple[int, int]]:
    """Of the first row of each plan."""
    return [(int(plan.rows.mode[0]), int(plan.rows.catch_up[0])) for plan in loop.plans]


def test_each_chunk_makes_up_for_the_one_before() -> None:
    loop = FakeLoop(MODEL)
    loop.complete(PROMPT, 8)
    chunks = [int(plan.rows.num_tokens[0]) for plan in loop.plans]
    assert chunks[:3] == [32, 32, 6]
    # The first window makes up for the last chunk.
    assert modes_and_catch_up(loop)[:4] == [(1, 0), (1, 32), (2, 32), (VERIFY, 6)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_windows_follow_the_prompt_at_once(depth: int) -> None:
    loop = FakeLoop(MODEL, depth=depth)
    loop.complete(PROMPT, 40)
    assert {mode for mode, _ in modes_and_catch_up(loop)[3:-2]} == {VERIFY}


def test_nothing_is_made_up_for_a_request_without_drafts() -> None:
    loop = FakeLoop(MODEL)
    loop.complete(PROMPT, 8, draft_cap=0)
    assert not any(catch_up for _, catch_up in modes_and_catch_up(loop))
    assert not any(any(result.drafter_len) for result in loop.results)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_prefix_of_a_drafting_request_is_shared_with_its_drafter_rows(recurrent: bool) -> None:
    """But not with a recurrent state, which is in no block."""
    loop = FakeLoop(MODEL, drafter_recurrent=recurrent)
    loop.complete(PROMPT, 20)
    loop.complete(PROMPT, 20)
    (tenancy,) = next(plan.admissions for plan in reversed(loop.plans) if plan.admissions)
    assert tenancy.num_cached == 68
    assert tenancy.drafter_len == (0 if recurrent else 67)


def test_a_prefix_without_drafter_rows_is_made_up_for_in_bounded_steps() -> None:
    loop = FakeLoop(MODEL)
    loop.complete(PROMPT, 2, draft_cap=0)
    first = len(loop.plans)
    loop.complete(PROMPT, 30)
    rows = modes_and_catch_up(loop)[first:]
    lagging = list(takewhile(lambda row: row[0] != VERIFY, rows))
    assert [catch_up for _, catch_up in lagging] == [32, 32]
    assert rows[len(lagging)][1] < 32
    assert {mode for mode, _ in lagging[1:]} == {DECODE}


def test_one_that_lags_far_does_not_keep_others_from_drafting() -> None:
    loop = FakeLoop(replace(MODEL, max_step_tokens=32))
    loop.complete(PROMPT, 2, draft_cap=0)
    quick = loop.add([7, 7, 7], 60)
    for _ in range(3):
        loop.step()
    late = loop.add(PROMPT, 30)
    for _ in range(3):
        plan = loop.step()
        assert plan is not None
        assert plan.rows.mode[0] == VERIFY
        assert plan.tenancies[0] is quick.tenancy
        assert plan.rows.catch_up.sum() <= 32
    loop.run()
    assert late.num_accepted > 0


def test_a_wrong_watermark_is_refused() -> None:
    loop = FakeLoop(MODEL)
    loop.add(PROMPT, 8)
    for _ in range(2):
        loop.step()
    plan = schedule(loop.state, now=0.0)
    assert plan is not None
    result = loop.engine.execute(to_proto(plan, 1000))
    result.drafter_len[0] -= 1
    with pytest.raises(LedgerError, match="covers 64 tokens, reported are 63"):
        commit_result(loop.state, from_proto([result]))


def test_a_window_that_is_not_caught_up_is_refused() -> None:
    def watermark(catch_up: int) -> int:
        told = {"mode": VERIFY, "max_proposed": 1, "catch_up": catch_up}
        rows = PlanRows(**{name: np.array([told.get(name, 0)]) for name in PlanRows.names()})
        after = drafter_watermark(rows, len_before=np.array([10]), drafter_len=np.array([6]))
        return int(after[0])

    assert watermark(4) == watermark(9) == 10
    with pytest.raises(LedgerError, match="drafts from a state of 9 tokens at length 10"):
        watermark(3)
