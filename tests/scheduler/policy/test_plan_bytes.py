"""No plan is larger than its bound, however many requests would move in at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.paced_loop import PacedLoop
from surestep_common.request_params import ROWS_BYTES, admission_bytes
from surestep_scheduler.engine.wire import to_proto

BLOCK = 16


def room_for(num_prompts: int, length: int) -> int:
    """Bytes of a plan that has room for so many admissions of so many tokens."""
    each = admission_bytes(length, length // BLOCK + 2, 0, vocab_size=1000, pool_size=1 << 15)
    return ROWS_BYTES + num_prompts * each


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    depth=st.integers(0, 2),
    room=st.integers(1, 3),
    fence_at=st.integers(0, 30),
    names=st.sampled_from(["a", "ab"]),
)
def test_plans_stay_within_their_bytes(
    lengths: list[int], depth: int, room: int, fence_at: int, names: str
) -> None:
    """Those that have to come back after a fault too; everybody is served in the end."""
    most = room_for(room, 3003)
    loop = PacedLoop(
        depth=depth,
        num_slots=64,
        num_blocks=1 << 15,
        max_plan_bytes=most,
        max_num_batched_tokens=8192,
    )
    seqs = [loop.add(names[i % len(names)], n, 3) for i, n in enumerate(lengths)]
    sizes = []
    while loop.step():
        sizes += [to_proto(plan, 1).ByteSize() for plan in loop.state.in_flight]
        loop.state.check()
        if loop.steps == fence_at:
            loop.lose_epoch()
    assert max(sizes, default=0) <= most
    assert all(len(seq.tokens) == seq.max_len for seq in seqs)


@pytest.mark.parametrize("room", [1, 4])
def test_siblings_of_a_cached_prompt_come_a_few_at_a_time(room: int) -> None:
    loop = PacedLoop(
        num_slots=64,
        num_blocks=1 << 15,
        max_plan_bytes=room_for(room, 3003),
        max_num_batched_tokens=8192,
        max_model_len=4096,
    )
    first = loop.add("a", 3000, 3)
    while loop.step():
        pass
    for number in range(12):
        request = first.request
        loop.add_like(request, f"sibling {number}")
    admitted = []
    while loop.step():
        admitted += [len(plan.admissions) for plan in list(loop.state.in_flight)[-1:]]
    assert max(admitted) == room
    assert loop.state.counters.prefix_cache_hits == 12 * 2992
    assert loop.state.counters.prompt_tokens_cached == 12 * 2992
    assert loop.state.counters.prompt_tokens == 13 * 3000
