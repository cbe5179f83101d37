"""A result that breaks an invariant is refused whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from surestep_common.invariants import LedgerError
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Outcome, Plan
from surestep_scheduler.core.sequence import Finish, Request
from surestep_scheduler.core.state import Replay, SchedulerState
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule

STOP = 9
VOCAB = 50


@pytest.fixture
def state() -> SchedulerState:
    """Two requests whose prompts, of five tokens, are planned."""
    limits = Limits(
        num_slots=2,
        num_blocks=16,
        block_size=4,
        max_model_len=32,
        vocab_size=VOCAB,
        max_num_batched_tokens=32,
        max_draft_tokens=3,
        max_queue_len=2,
        pipeline_depth=1,
    )
    state = SchedulerState(limits)
    state.open_epoch(1, limits)
    for name in "ab":
        state.add(asked(name), now=0.0)
    assert schedule(state, now=0.0)
    return state


def asked(name: str, **wants: Any) -> Request:
    return Request(
        id=name,
        prompt_ids=[1, 2, 3, 4, 5],
        emitted_ids=[],
        max_tokens=20,
        stop_ids=frozenset([STOP]),
        sampling=sampling_pb2.SamplingParams(),
        **wants,
    )


def answer(
    state: SchedulerState, windows: list[list[int]], accepted: list[int], drafts: int = 3
) -> Outcome:
    """Return the report of a rank for the oldest plan in flight."""
    plan = state.in_flight[0]
    result = pb.StepResult(
        epoch=plan.epoch,
        step=plan.step,
        slot=plan.rows.slot.tolist(),
        slot_epoch=plan.rows.slot_epoch.tolist(),
        status=[pb.OK] * len(windows),
        len_before=state.slots.committed[plan.rows.slot].tolist(),
        n_drafts=np.minimum(plan.rows.max_drafts, drafts).tolist(),
        n_accepted=accepted,
        n_emitted=map(len, windows),
        token_ids=[token for window in windows for token in window],
    )
    return from_proto([result])


def emitted(state: SchedulerState) -> list[list[int]]:
    return [list(seq.tokens[5:]) for seq in state.open.values()]


@pytest.mark.parametrize(
    ("second", "accepted", "message"),
    [
        ([11, 12], 2, "2 tokens emitted for 2 accepted drafts"),
        ([11, STOP, 12], 2, "tokens behind a stop id"),
        ([11, VOCAB], 1, "token id 50 of a vocabulary of 50"),
    ],
)
def test_nothing_is_committed(
    state: SchedulerState, second: list[int], accepted: int, message: str
) -> None:
    commit_result(state, answer(state, [[6], [7]], [0, 0]))
    assert schedule(state, now=0.0)
    with pytest.raises(LedgerError, match=message):
        commit_result(state, answer(state, [[10, 11], second], [1, accepted]))
    assert emitted(state) == [[6], [7]]
    state.check()
    assert state.fence() == Replay(2, 12)
    assert [seq.num_steps for seq in state.open.values()] == [1, 1]


def test_only_the_request_that_stops_ends(state: SchedulerState) -> None:
    commit_result(state, answer(state, [[6], [7]], [0, 0]))
    assert schedule(state, now=0.0)
    outputs = commit_result(state, answer(state, [[10, 11, STOP], [12]], [3, 0]))
    assert [list(output.token_ids) for output in outputs] == [[10, 11, STOP], [12]]
    assert [output.finish for output in outputs] == [Finish.STOP, None]
    assert list(state.open) == ["b"]
    first = outputs[0].seq
    assert (first.num_steps, first.num_drafts, first.num_accepted) == (2, 3, 3)
    assert state.counters.accepted.counts.tolist() == [1, 0, 0, 1]
    state.check()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("want_logprobs", "0 log-probabilities of 1 tokens"),
        ("want_prompt_logprobs", "0 log-probabilities of 4 a prompt's positions"),
    ],
)
def test_log_probabilities_that_are_wanted_must_come(
    state: SchedulerState, wanted: str, message: str
) -> None:
    state.abort(state.open["a"])
    commit_result(state, answer(state, [[6], [7]], [0, 0]))
    state.add(asked("c", **{wanted: True}), now=0.0)
    assert schedule(state, now=0.0)
    with pytest.raises(LedgerError, match=message):
        commit_result(state, answer(state, [[8], [9]], [0, 0], drafts=0))


def test_a_step_that_workers_want_captured_is_ordered_once(state: SchedulerState) -> None:
    """By the next plan; a new epoch, whose workers may have captured nothing, asks anew."""
    planned = list[Plan]()
    for missed_kind in (7, 0, 8):
        commit_result(state, replace(answer(state, [[1], [1]], [0, 0]), missed_kind=missed_kind))
        planned += filter(None, [schedule(state, now=0.0)])
    assert [to_proto(plan, 1).capture for plan in planned] == [7, 0, 8]
    commit_result(state, replace(answer(state, [[1], [1]], [0, 0]), missed_kind=9))
    state.fence()
    state.open_epoch(2, state.limits)
    again = schedule(state, now=0.0)
    assert again is not None
    assert again.capture == 0
