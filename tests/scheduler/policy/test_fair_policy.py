"""What tenants get of busy workers, whatever the others send: bounds, by simulation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.paced_loop import PacedLoop
from surestep_scheduler.core.sequence import Sequence

SLOTS, BUDGET = 16, 512


def long_prompts(loop: PacedLoop, tenant: str) -> None:
    for _ in range(200):
        loop.add(tenant, 2000, 50)


def long_answers(loop: PacedLoop, tenant: str) -> None:
    for _ in range(SLOTS):
        loop.add(tenant, 10, 3000)


def siblings(loop: PacedLoop, tenant: str) -> None:
    for _ in range(128):
        loop.add(tenant, 500, 200, draft_cap=3)


def high_priorities(loop: PacedLoop, tenant: str) -> None:
    for _ in range(40):
        loop.add(tenant, 300, 300, priority=-10)


def short_ones(loop: PacedLoop, tenant: str) -> None:
    for _ in range(300):
        loop.add(tenant, 5, 5)


HABITS: dict[str, Callable[[PacedLoop, str], None]] = {
    made.__name__: made
    for made in (long_prompts, long_answers, siblings, high_priorities, short_ones)
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    depth=st.integers(0, 2),
    habits=st.lists(st.sampled_from(list(HABITS)), min_size=1, max_size=5),
    busy_for=st.integers(0, 60),
    length=st.integers(1, 40),
    gaps=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    loses=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_short_prompt_waits_for_three_steps_and_its_own(
    depth: int,
    habits: list[str],
    busy_for: int,
    length: int,
    gaps: list[int],
    loses: bool,
    seed: int,
) -> None:
    """At a depth of 1; a step in flight more or less is two steps of waiting more or less.

    The steps in flight end, a slot is taken from somebody, is free when nothing in flight means it
    any more, and the prompt is behind what was planned meanwhile. Its tokens fit into a fair share.
    """
    loop = PacedLoop(depth=depth, seed=seed, num_slots=SLOTS, max_num_batched_tokens=BUDGET)
    for index, habit in enumerate(habits):
        HABITS[habit](loop, f"other {index}")
    for _ in range(busy_for):
        loop.step()
    if loses:
        loop.lose_epoch()
    for gap in gaps:
        seq = loop.add("short", length, 3)
        assert loop.steps_to_first_token(seq) <= 1 + 2 * depth + 1
        for _ in range(gap):
            loop.step()
        loop.state.check()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    depth=st.integers(0, 1),
    num_blocks=st.integers(200, 600),
    lengths=st.lists(st.integers(200, 1500), min_size=20, max_size=30),
    gaps=st.lists(st.integers(0, 30), min_size=1, max_size=6),
)
@pytest.mark.rotates(3)
def test_scarce_blocks_are_shared_too(
    depth: int, num_blocks: int, lengths: list[int], gaps: list[int]
) -> None:
    """A tenant holds all blocks and wants more of them; what it lost it may make up for first."""
    loop = PacedLoop(depth=depth, num_slots=SLOTS, num_blocks=num_blocks)
    long = [loop.add("long", length, 900) for length in lengths]
    for _ in range(40):
        loop.step()
    for gap in gaps:
        seq = loop.add("short", 5, 3)
        assert loop.steps_to_first_token(seq) <= 3 + 2 * depth
        for _ in range(gap):
            loop.step()
    while loop.step():
        loop.state.check()
    assert all(len(seq.tokens) == seq.max_len for seq in long)


@pytest.mark.parametrize("same", [True, False], ids=["one tenant", "many tenants"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_long_prompt_does_not_starve_behind_short_ones(depth: int, same: bool) -> None:
    """Short prompts come without end, for all that the workers can do."""
    loop, rng = PacedLoop(depth=depth, num_slots=SLOTS, max_model_len=16384), random.Random(3)
    for _ in range(20):
        loop.add("0", 100, 5)
    seq, length = loop.add("0", 8000, 5), 8000
    began = loop.steps
    while len(seq.tokens) == length:
        for _ in range(12):
            loop.add("0" if same else str(rng.randint(0, 4)), 100, 5)
            if len(loop.state.waiting) > 900:
                loop.state.abort(list(loop.state.waiting)[-1])
        assert loop.step()
    share = BUDGET // 2 if same else BUDGET // 5 // 2
    assert loop.steps - began <= length / (0.8 * share) + 100


def test_a_prompt_that_needs_many_blocks_does_not_starve_behind_new_tenants() -> None:
    """Short requests always wait, each of a tenant of its own."""
    loop = PacedLoop(num_slots=8, num_blocks=101, max_num_batched_tokens=BUDGET)
    for number in range(12):
        loop.add(f"{number}", 140, 40)
    for _ in range(30):
        loop.step()
    seq = loop.add("large", 960, 4)
    began, number = loop.steps, 0
    while seq.queue_s is None:
        while len(loop.state.waiting) < 4:
            number += 1
            loop.add(f"stranger {number}", 140, 40)
        assert loop.step()
        assert loop.steps - began < 600


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    weight=st.sampled_from([1.0, 2.0, 3.0]),
    habits=st.tuples(*[st.sampled_from(["long_prompts", "siblings"])] * 2),
    depth=st.integers(0, 2),
)
@pytest.mark.rotates(1)
def test_service_is_by_weight(weight: float, habits: tuple[str, str], depth: int) -> None:
    """Two tenants who always want more: slots, prompts and answers, each in proportion."""
    loop = PacedLoop(depth=depth, num_slots=SLOTS)
    rates = {"light": 1.0, "heavy": weight}

    def wish(tenant: str, habit: str) -> Sequence:
        if habit == "long_prompts":
            return loop.add(tenant, 400, 20, weight=rates[tenant])
        return loop.add(tenant, 20, 100, weight=rates[tenant])

    wanted = dict(zip(rates, habits, strict=True))
    running: dict[str, int] = dict.fromkeys(rates, 0)
    for round_ in range(600):
        for tenant, habit in wanted.items():
            for _ in range(20 - sum(seq.tenant.name == tenant for seq in loop.state.waiting)):
                wish(tenant, habit)
        loop.step()
        if round_ >= 100:
            for tenancy in loop.state.running:
                running[tenancy.seq.tenant.name] += 1
    share = running["heavy"] / sum(running.values())
    assert abs(share - weight / (1 + weight)) < 0.1


def test_nothing_goes_back_and_forth() -> None:
    """Two tenants who want everything part the slots once, and then nobody is displaced."""
    loop = PacedLoop(num_slots=SLOTS)
    long_answers(loop, "first")
    for _ in range(20):
        loop.step()
    long_answers(loop, "second")
    for _ in range(20):
        loop.step()
    assert loop.state.counters.displacements == SLOTS // 2
    for _ in range(300):
        loop.step()
    assert loop.state.counters.preemptions == SLOTS // 2


def test_more_tenants_than_slots_take_turns() -> None:
    loop = PacedLoop(num_slots=SLOTS)
    seqs = [loop.add(str(index), 10, 400) for index in range(3 * SLOTS)]
    for _ in range(1000):
        loop.step()
    emitted = [len(seq.tokens) - 10 for seq in seqs]
    assert min(emitted) > 0.6 * max(emitted)
    while loop.step():
        loop.state.check()
    assert all(len(seq.tokens) == seq.max_len for seq in seqs)


def test_one_tenant_alone_is_displaced_by_nobody() -> None:
    loop = PacedLoop(num_slots=SLOTS)
    for habit in HABITS.values():
        habit(loop, "alone")
    for _ in range(200):
        loop.step()
    assert len(loop.state.running) == SLOTS
    assert loop.state.counters.preemptions == 0


def test_tenants_survive_the_loss_of_workers() -> None:
    loop = PacedLoop(num_slots=SLOTS)
    seqs = [loop.add(name, 50, 60) for name in "aab" for _ in range(12)]
    for _ in range(20):
        loop.step()
    served = {tenant.name: tenant.served for tenant in loop.state.tenants}
    loop.lose_epoch()
    loop.state.check()
    for _ in range(3):
        loop.step()
    # What is computed again is nobody's service.
    assert all(t.served < served[t.name] + 600 for t in loop.state.tenants)
    while loop.step():
        pass
    assert all(len(seq.tokens) == seq.max_len for seq in seqs)
    assert len(loop.state.tenants) == 0
