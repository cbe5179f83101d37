"""The circuit breaker: examples, and what holds after any history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from surestep_gateway.schedulers.losses import BreakerState, CircuitBreaker


def tripped(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(3):
        breaker.failed(breaker.begin(now), now)
    return breaker


def test_three_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker()
    for expected in (BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN):
        breaker.failed(breaker.begin(0), 0)
        assert breaker.state(0) is expected
    assert not breaker.admits(0.49)
    assert breaker.waits_s(0.25) == 0.25
    assert breaker.admits(0.5)


def test_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(9):
        breaker.failed(breaker.begin(0), 0)
        breaker.worked(breaker.begin(0))
    assert breaker.state(0) is BreakerState.CLOSED


def test_a_crash_under_many_calls_is_one_failure() -> None:
    breaker = CircuitBreaker()
    calls = [breaker.begin(0) for _ in range(16)]
    for call in calls:
        breaker.failed(call, 1)
    assert breaker.state(1) is BreakerState.CLOSED


def test_tokens_that_were_on_their_way_are_no_recovery() -> None:
    breaker = CircuitBreaker()
    old = breaker.begin(0)
    for _ in range(3):
        breaker.failed(breaker.begin(0), 0)
    breaker.worked(old)
    assert breaker.state(0) is BreakerState.OPEN


def test_half_open_lets_one_call_through() -> None:
    breaker = tripped()
    probe = breaker.begin(1)
    assert not breaker.admits(1)
    breaker.ended(probe)  # refused: another may try
    assert breaker.admits(1)
    breaker.worked(breaker.begin(1))
    assert breaker.state(1) is BreakerState.CLOSED


def test_pauses_grow_up_to_a_bound() -> None:
    breaker, now, pauses = tripped(), 0.5, []
    for _ in range(10):
        breaker.failed(breaker.begin(now), now)
        wait = breaker.waits_s(now)
        assert wait is not None
        pauses.append(wait)
        now += wait
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "worked", "failed", "ended"]), st.integers(0, 9)),
    max_size=60,
)


@given(EVENTS)
def test_any_history(events: list[tuple[str, int]]) -> None:
    """It never locks up: after the longest pause a call may begin, and its success closes it."""
    breaker, open_calls, now = CircuitBreaker(), list[int](), 0.0
    for kind, number in events:
        now += number / 4
        if kind == "begin" and breaker.admits(now):
            open_calls.append(breaker.begin(now))
        elif kind != "begin" and open_calls:
            call = open_calls.pop(number % len(open_calls))
            match kind:
                case "worked":
                    breaker.worked(call)
                case "failed":
                    breaker.failed(call, now)
            breaker.ended(call)
    for call in open_calls:
        breaker.ended(call)
    now += 30
    assert breaker.admits(now)
    breaker.worked(breaker.begin(now))
    assert breaker.state(now) is BreakerState.CLOSED


@given(st.lists(st.sampled_from(["worked", "ended"]), max_size=40))
def test_only_failures_open_it(outcomes: list[str]) -> None:
    breaker = CircuitBreaker()
    for outcome in outcomes:
        call = breaker.begin(0)
        if outcome == "worked":
            breaker.worked(call)
        breaker.ended(call)
        assert breaker.state(0) is BreakerState.CLOSED
