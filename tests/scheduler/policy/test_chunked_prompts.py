"""Prompts of workers that compute them in chunks: cut between chunks, and never kept waiting.

In the fake model a token in a whole chunk is another than one that goes alone, and a plan that cuts
a chunk breaks an invariant: whatever is shared or computed again wrongly changes tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fakes.loop import FakeLoop, hopeless, perfect
from support.fakes.model import FakeModel
from surestep_common.errors import InvalidRequest
from surestep_proto import sampling_pb2 as pb
from surestep_scheduler.core.sequence import Sequence

CHUNK = 8
MODEL = FakeModel(
    recurrent=True, num_snapshots=12, prompt_chunk=CHUNK, num_slots=4, max_step_tokens=4 + CHUNK
)


def prompt(length: int, last: int = 90) -> list[int]:
    return [i % 90 for i in range(length - 1)] + [last]


def expected(seq: Sequence) -> list[int]:
    wish = seq.request
    return MODEL.complete(wish.prompt_ids, wish.max_tokens, wish.sampling)


def check(*seqs: Sequence) -> None:
    for seq in seqs:
        assert list(seq.tokens[seq.prompt_len :]) == expected(seq)


def hits(loop: FakeLoop, tokens: list[int], max_tokens: int = 3) -> int:
    """Tokens found in the cache by a request whose answer is right."""
    seq = loop.add(tokens, max_tokens)
    loop.run()
    check(seq)
    return seq.num_cached


@pytest.mark.parametrize("length", range(1, 3 * CHUNK + 2))
def test_prefixes_are_shared_up_to_a_whole_chunk(length: int) -> None:
    loop = FakeLoop(MODEL)
    assert hits(loop, prompt(length)) == 0
    for last in (91, 90):
        assert hits(loop, prompt(length, last)) == (length - 1) // CHUNK * CHUNK


def test_the_tail_of_a_prompt_is_no_part_of_a_longer_one() -> None:
    """Nor is what was emitted: both went token by token, and go in chunks there."""
    loop = FakeLoop(MODEL)
    turn = loop.complete(prompt(2 * CHUNK - 1), 20)
    assert hits(loop, [*turn, 5]) == CHUNK
    assert hits(loop, [*turn, 6]) == (len(turn) // CHUNK) * CHUNK, "it was computed in chunks now"


@pytest.mark.parametrize("drafter", [perfect, hopeless])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_goes_on_beside_rows_with_drafts(depth: int, drafter: Any) -> None:
    """The budget leaves a chunk beside all other slots; drafts do not take it."""
    loop = FakeLoop(MODEL, depth=depth, drafter=drafter)
    others = [loop.add([i, i], 90) for i in range(3)]
    for _ in range(5):
        loop.step()
    late = loop.add(prompt(6 * CHUNK + 3), 2)
    steps = 0
    while late.request.id in loop.state.open:
        loop.step()
        steps += 1
    assert steps <= 10 + depth
    assert any(seq.request.id in loop.state.open for seq in others)
    loop.run()
    check(*others, late)


def test_a_tenant_of_little_weight_is_not_kept_waiting() -> None:
    """Its share of a step would be less than a chunk."""
    loop = FakeLoop(replace(MODEL, max_step_tokens=3 * CHUNK, num_slots=8))
    heavy = [loop.add(prompt(100, i), 1, tenant="heavy", weight=50.0) for i in range(6)]
    light = loop.add(prompt(3 * CHUNK, 7), 1, tenant="light", weight=1.0)
    while light.request.id in loop.state.open:
        assert loop.step() is not None
    assert any(seq.request.id in loop.state.open for seq in heavy)
    loop.run()
    check(light, *heavy)


def test_preemptions_and_faults_change_nothing() -> None:
    loop = FakeLoop(MODEL, depth=1)
    seqs = [loop.add(prompt(4 * CHUNK + 5, i), 40) for i in range(6)]
    for turn in range(30):
        loop.step()
        if turn % 3 == 0 and loop.state.running:
            loop.state.preempt(loop.state.running[-1])
        if turn == 20:
            loop.fence()
    loop.run()
    check(*seqs)
    assert sum(seq.num_preemptions for seq in seqs) > 5
    assert any(seq.num_replays for seq in seqs)


def test_what_is_decoded_takes_no_snapshots() -> None:
    loop = FakeLoop(MODEL)
    loop.complete(prompt(CHUNK + 1), 60)
    lengths = {int(n) for plan in loop.plans for n in plan.snapshot_requests.length}
    assert lengths == {CHUNK}


def test_prompt_logprobs_and_suspects_take_whole_chunks() -> None:
    """However many positions a step may have of them."""
    loop = FakeLoop(MODEL)
    sampling = pb.SamplingParams(want_prompt_logprobs=True, num_top_prompt_logprobs=128)
    seq = loop.add(prompt(30), 3, want_prompt_logprobs=True, sampling=sampling)
    assert seq.shape(loop.state.limits, usual=False).max_chunk == CHUNK
    loop.run()
    check(seq)


def test_a_step_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\(11\) must exceed max_num_seqs \(4\) by 8"):
        FakeLoop(replace(MODEL, max_step_tokens=11))
