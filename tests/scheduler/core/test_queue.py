"""Who may wait, for how long those that may not are told to stay away, and who has a turn."""

from __future__ import annotations

import pytest
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_common.errors import QueueFull
from surestep_scheduler.core.poison import CANARY
from surestep_scheduler.core.sequence import Request

MODEL = FakeModel(
    num_slots=2, max_step_tokens=16, max_draft_tokens=0, max_model_len=1024, num_blocks=512
)


def request(name: str, length: int, emitted: int = 0) -> Request:
    return Request(id=name, prompt_ids=[1] * length, emitted_ids=[2] * emitted, max_tokens=9)


def test_tokens_that_wait_are_bounded() -> None:
    state = FakeLoop(MODEL, max_queue_tokens=100).state
    state.add(request("a", 60), now=0)
    state.add(request("b", 40), now=0)
    with pytest.raises(QueueFull, match="100 tokens are waiting already"):
        state.add(request("c", 1), now=0)
    assert (state.waiting.num_tokens, state.waiting.num_refused) == (100, 1)
    state.check()


def test_a_request_above_the_bound_may_wait_alone() -> None:
    state = FakeLoop(MODEL, max_queue_tokens=10).state
    state.add(request("a", 60), now=0)
    with pytest.raises(QueueFull):
        state.add(request("b", 1), now=0)


def test_who_has_delivered_tokens_is_not_turned_away() -> None:
    state = FakeLoop(MODEL, max_queue_len=1, max_queue_tokens=10).state
    state.add(request("a", 60), now=0)
    state.add(request("b", 60, emitted=3), now=0)
    assert len(state.waiting) == 2


def test_canaries_are_not_turned_away() -> None:
    state = FakeLoop(MODEL, max_queue_len=1, max_queue_tokens=10).state
    state.add(request("a", 60), now=0)
    state.add(request(CANARY, 1), now=0)
    assert len(state.waiting) == 2


def test_replays_are_not_turned_away() -> None:
    loop = FakeLoop(MODEL, max_queue_len=2, max_queue_tokens=10)
    for _ in range(2):
        loop.add([1] * 5, 9)
    loop.step()
    loop.add([1] * 9, 9)
    loop.fence()
    assert len(loop.state.waiting) == 3
    assert loop.state.waiting.num_tokens == 21
    loop.run()
    assert loop.state.counters.finished == {"length": 3}
    loop.state.check()


def test_the_wait_follows_from_how_fast_the_queue_drains() -> None:
    state = FakeLoop(MODEL, max_queue_len=3, max_queue_tokens=1000).state
    seqs = [state.add(request(f"a{i}", 50), now=0) for i in range(2)]
    for second, seq in enumerate(seqs):  # 50 tokens and one request every 4 seconds
        state.admit(seq, now=4.0 * second)
    for i in range(3):
        state.add(request(f"b{i}", 100), now=5)
    with pytest.raises(QueueFull) as refusal:
        state.add(request("c", 1), now=8)
    assert refusal.value.retry_after == 4  # for the one request that is too many
    for seq in list(state.waiting)[1:]:
        state.abort(seq)
    state.add(request("d", 100), now=8)
    with pytest.raises(QueueFull) as refusal:
        state.add(request("e", 925), now=8)
    assert refusal.value.retry_after == 10  # for 125 tokens


def test_new_requests_get_tokens_while_long_ones_are_computed_again() -> None:
    model = FakeModel(max_model_len=1024, num_blocks=4096, max_step_tokens=512)
    loop = FakeLoop(model)
    long = [loop.add([i] * 900, 100) for i in range(8)]
    while len(loop.state.running) < len(long):
        loop.step()
    loop.fence()
    loop.plans.clear()
    new = loop.add([99] * 20, 3)
    while len(new.tokens) == 20:
        loop.step()
    assert len(loop.plans) <= 2
    assert sum(seq.is_replaying for seq in long) == 8
    shares = [plan.rows.num_tokens[plan.rows.slot == 0].sum() for plan in loop.plans]
    assert min(shares) >= 256  # the first in the order goes on meanwhile
    loop.run()
    done = [output.seq for output in loop.outputs if output.finish is not None]
    assert [seq for seq in done if seq is not new] == long  # in their order


def test_replays_share_what_the_new_epoch_has_computed() -> None:
    loop = FakeLoop(FakeModel(max_step_tokens=32))
    seqs = [loop.add([7] * 60, 9) for _ in range(4)]
    while any(len(seq.tokens) == 60 for seq in seqs):
        loop.step()
    loop.fence()
    loop.plans.clear()
    loop.run()
    cached = [t.num_cached for plan in loop.plans for t in plan.admissions]
    assert cached[0] == 0
    assert max(cached) == 60
