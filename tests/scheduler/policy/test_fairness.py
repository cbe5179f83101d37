"""Fair shares, counters of service, and places in the queue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.paced_loop import PacedLoop
from surestep_common.errors import InvalidRequest, QueueFull
from surestep_scheduler.core.queue import Tenants
from surestep_scheduler.policy.sharing import entitlements, fair_shares

AMOUNTS = st.floats(0, 1000)
CLAIMS = st.lists(st.tuples(AMOUNTS, st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=12)


@given(capacity=st.floats(0.1, 3000), claims=CLAIMS)
def test_shares_are_max_min_fair(capacity: float, claims: list[tuple[float, float]]) -> None:
    """Nobody could have more without somebody having less who has no more for its weight."""
    demands, weights = (np.array(column) for column in zip(*claims, strict=True))
    shares = fair_shares(capacity, demands, weights)
    assert shares.sum() == pytest.approx(min(capacity, demands.sum()))
    assert (shares <= demands + 1e-9).all()
    levels, unsatisfied = shares / weights, shares < demands - 1e-6
    if unsatisfied.any():
        assert levels[unsatisfied].min() >= levels.max() - 1e-6 * levels.max() - 1e-9


@given(capacity=st.integers(1, 256), claims=CLAIMS)
def test_what_is_taken_from_one_is_not_taken_back(
    capacity: int, claims: list[tuple[float, float]]
) -> None:
    demands, weights = zip(*claims, strict=True)
    entitled = entitlements(capacity, demands, weights)
    assert min(entitled) >= 1
    if len(claims) <= capacity and sum(demands) > capacity:
        # Whatever the places are now: who is below can only take from who is above.
        assert sum(entitled) <= capacity + len(claims)


def test_who_comes_back_has_saved_nothing() -> None:
    loop = PacedLoop(num_slots=2)
    for _ in range(40):
        loop.add("busy", 100, 50)
    for _ in range(100):
        loop.step()
    busy = loop.state.tenants.known("busy")
    newcomer = loop.add("new", 10).tenant
    assert busy is not None
    assert newcomer.served == busy.served > 1000


def test_debts_are_remembered() -> None:
    tenants = Tenants()
    one = tenants.join("one", 1.0)
    two = tenants.join("two", 1.0)
    tenants.charge(np.array([two.index, two.index]), np.array([30.0, 12.0]))
    tenants.leave(two)
    assert [tenant.name for tenant in tenants] == ["one"]
    again = tenants.join("two", 2.0)
    assert (again.served, again.weight, one.served) == (42.0, 2.0, 0.0)
    tenants.check()


def test_memory_of_tenants_is_bounded() -> None:
    tenants = Tenants()
    for number in range(5000):
        tenants.leave(tenants.join(f"user {number}", 1.0))
    assert len(tenants) == 0
    assert len(vars(tenants)["_past"]) == 1024
    assert len(vars(tenants)["_by_index"]) == 1


def test_a_full_queue_has_room_for_others() -> None:
    loop = PacedLoop(max_queue_len=10, max_queue_tokens=1000)
    for _ in range(10):
        loop.add("greedy", 20)
    with pytest.raises(QueueFull, match="10 requests are waiting already"):
        loop.add("greedy", 20)
    for _ in range(5):
        loop.add("modest", 20)
    with pytest.raises(QueueFull):
        loop.add("modest", 20)
    for name in "abcde":
        loop.add(name, 20)
    with pytest.raises(QueueFull):  # twice the bound is all there is
        loop.add("f", 20)
    loop.state.check()


def test_tokens_of_a_full_queue_alike() -> None:
    loop = PacedLoop(max_queue_tokens=1000)
    loop.add("greedy", 1000)
    with pytest.raises(QueueFull, match="1000 tokens are waiting already"):
        loop.add("greedy", 1)
    loop.add("modest", 700)  # it has nothing there yet
    with pytest.raises(QueueFull):
        loop.add("modest", 1)
    loop.state.check()


def test_the_queue_is_in_order_within_a_tenant_only() -> None:
    loop = PacedLoop(num_slots=1, priority_aging_s=30.0)
    first = loop.add("a", 10, 1)
    late = loop.add("a", 10, 1)
    urgent = loop.add("a", 10, 1, priority=-1)
    other = loop.add("b", 10, 1, priority=10)
    assert list(loop.state.waiting) == [urgent, first, late, other]
    while loop.step():
        pass
    assert other.queue_s is not None
    assert urgent.queue_s == 0
    assert 0 < other.queue_s < min(first.queue_s or 0, late.queue_s or 0)


def test_requests_of_an_id_that_is_open() -> None:
    loop = PacedLoop()
    request = loop.add("a", 10).request
    with pytest.raises(InvalidRequest, match="is open already"):
        loop.state.add(request, 0.0)
    loop.state.check()
