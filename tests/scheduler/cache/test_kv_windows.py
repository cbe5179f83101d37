"""KV groups with windows: what requests hold, find in the cache and give back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.fakes.loop import FakeLoop, perfect
from support.fakes.model import FakeModel, ragged
from surestep_common.errors import RequestTooLarge
from surestep_scheduler.cache import prefix
from surestep_scheduler.core.sequence import Finish, Sequence

WINDOW, BLOCK = 9, 4
MODEL = FakeModel(
    kv_windows=(0, WINDOW),
    block_size=BLOCK,
    num_blocks=400,
    max_model_len=200,
    max_step_tokens=40,
)
PROMPT = random.Random(4).choices(range(MODEL.vocab_size), k=70)


def right(loop: FakeLoop, seq: Sequence, max_tokens: int) -> bool:
    """Whether a request has emitted what the model says."""
    emitted, sampling = seq.tokens[seq.prompt_len :].tolist(), seq.request.sampling
    prompt = seq.tokens[: seq.prompt_len].tolist()
    return emitted == loop.engine.model.complete(prompt, max_tokens, sampling)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", [perfect, ragged(0.5)])
def test_a_request_holds_what_steps_in_flight_see(depth: int, drafter: object) -> None:
    loop = FakeLoop(MODEL, depth=depth, drafter=drafter)  # type: ignore[arg-type]
    seq, groups = loop.add(PROMPT, 100), loop.state.limits.groups
    while loop.step() is not None:
        if seq.tenancy is None:
            continue
        whole, window = seq.tenancy.tables
        slot, slots = seq.tenancy.slot, loop.state.slots
        # A plan is made ahead of the results, and drafts that are rejected leave blocks behind.
        rows = int(slots.len_hi[slot] - slots.committed[slot]) + 1 + MODEL.max_draft_tokens
        assert len(window.blocks) <= groups.most_at_once(WINDOW, max(rows, 1 + 2 * depth * 4))
        assert whole.first == 0
        assert window.end <= whole.end
    assert right(loop, seq, 100)
    assert loop.state.pool.num_used == 0


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("num_blocks", [8, 13, 22])
def test_the_longest_request_fits_alone_and_no_longer_one(num_blocks: int, depth: int) -> None:
    model = replace(MODEL, num_blocks=num_blocks)
    loop = FakeLoop(model, depth=depth, drafter=ragged(0.5))
    longest = loop.state.limits.max_request_len
    assert longest == (num_blocks - 1 - 3) * BLOCK + 1  # three blocks always hold the window
    with pytest.raises(RequestTooLarge):
        loop.add(PROMPT[:1] * longest, 1)
    for prompt_len in (1, longest // 2, longest - 1):  # the later ones find some of it cached
        seq = loop.add((PROMPT * 2)[:prompt_len], longest)
        loop.run()
        assert right(loop, seq, longest - prompt_len)
        assert len(seq.tokens) == longest


def cached_after(cut: int, first: list[int], *, prompt_len: int = len(PROMPT)) -> int:
    loop = FakeLoop(MODEL, depth=1)
    loop.add(first, 5)
    loop.run()
    text = [*first[:cut], *[MODEL.vocab_size - 1 - t for t in first[cut:]]][:prompt_len]
    seq = loop.add(text, 8)
    loop.run()
    assert right(loop, seq, 8)
    return seq.num_cached


@pytest.mark.parametrize("cut", range(0, len(PROMPT) + 1, 3))
def test_prefixes_are_found_at_every_offset(cut: int) -> None:
    """Every block was published when it was full, and blocks behind the window are still there."""
    assert cached_after(cut, PROMPT) == min(cut, len(PROMPT) - 1) // BLOCK * BLOCK


def test_a_prefix_is_cut_where_the_window_is_gone() -> None:
    loop = FakeLoop(MODEL)
    loop.add(PROMPT, 5)
    loop.run()
    seq = loop.state.sequence(loop.add(PROMPT, 5).request, 0.0)
    pool, groups = loop.state.pool, loop.state.limits.groups
    keys = seq.chain.keys(seq.tokens, 0, 17)
    assert prefix.longest(pool, keys, groups) == 17
    # Behind n whole blocks, n * 4 tokens, the next token sees the last 8 of these: two blocks.
    for gone, expected in ((3, 17), (16, 16), (12, 16), (15, 15), (13, 12), (5, 12), (10, 10)):
        (key,) = prefix.in_group(1, [keys[gone]])
        pool.forget(key)
        assert prefix.longest(pool, keys, groups) == expected, gone
    pool.forget(keys[2])
    assert prefix.longest(pool, keys, groups) == 2
    pool.forget(keys[0])
    assert prefix.longest(pool, keys, groups) == 0


def test_blocks_of_a_window_make_room_for_others_without_preemption() -> None:
    """Two long prompts in a pool that has room for what both see, not for all of both."""
    limits = FakeLoop(MODEL).state.limits
    needed = 2 * (limits.blocks_of(len(PROMPT) + 41) + 1)
    assert needed < 2 * 2 * len(PROMPT) // BLOCK
    loop = FakeLoop(replace(MODEL, num_blocks=1 + needed), depth=1)
    seqs = [loop.add([i, *PROMPT[1:]], 40) for i in range(2)]
    loop.run()
    assert all(right(loop, seq, 40) for seq in seqs)
    assert loop.state.counters.preemptions == 0
    assert any(len(plan.tenancies) == 2 for plan in loop.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_go_on(depth: int, caching: bool) -> None:
    model = replace(MODEL, num_blocks=45, num_slots=6)
    loop = FakeLoop(model, depth=depth, drafter=ragged(0.6), enable_prefix_caching=caching)
    seqs = [loop.add([*PROMPT[:30], i], 60) for i in range(8)]
    loop.run()
    assert loop.state.counters.preemptions > 0
    assert all(right(loop, seq, 60) for seq in seqs)


def test_prompts_too_long_for_the_pool_together_take_turns() -> None:
    """No prompt keeps the blocks that another one needs for its next token for ever."""
    model = replace(MODEL, num_blocks=60, num_slots=8, max_step_tokens=150)
    loop = FakeLoop(model, depth=2)
    seqs = [loop.add([i, *(PROMPT * 2)[:100]], 3) for i in range(6)]
    loop.run()
    assert all(right(loop, seq, 3) for seq in seqs)


def test_a_lost_epoch_is_replayed() -> None:
    loop = FakeLoop(MODEL, depth=2)
    seqs = [loop.add([*PROMPT, i], 30) for i in range(3)]
    for _ in range(6):
        loop.step()
    loop.fence()
    loop.run()
    assert all(right(loop, seq, 30) for seq in seqs)
    assert {output.finish for output in loop.outputs if output.finish} == {Finish.LENGTH}


def test_siblings_share_their_prompt() -> None:
    loop = FakeLoop(MODEL, depth=1)
    loop.add(PROMPT, 2)
    loop.run()
    used = [loop.add(PROMPT, 20) for _ in range(4)]
    loop.step()
    held = [seq.tenancy.tables for seq in used if seq.tenancy is not None]
    assert len(held) == 4
    for tables in zip(*held, strict=True):  # of a group
        first = {table.first for table in tables}
        assert len(first) == 1
        cached = len(PROMPT) // BLOCK - first.pop()
        assert len({tuple(table.blocks[:cached]) for table in tables}) == 1
    loop.run()
    assert all(right(loop, seq, 20) for seq in used)
