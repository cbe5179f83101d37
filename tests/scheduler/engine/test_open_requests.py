from __future__ import annotations

from surestep_scheduler.engine.open_requests import Attempt, Timeline


def test_a_request_that_nothing_happens_to() -> None:
    timeline = Timeline(1.0)
    timeline.admitted(2.0)
    timeline.tokens(3.0)
    timeline.tokens(4.0)
    timeline.end(5.0)
    assert list(timeline.attempts) == [Attempt(1.0, 2.0, 3.0, 4.0, 5.0)]


def test_after_the_loss_of_workers_there_is_another_attempt() -> None:
    timeline = Timeline(1.0)
    timeline.lost(1.5)  # it waits: nothing of it is lost
    timeline.admitted(2.0)
    timeline.tokens(3.0)
    timeline.lost(4.0)
    timeline.lost(4.5)  # again, before it was admitted
    timeline.admitted(5.0)
    timeline.lost(6.0)
    timeline.end(7.0)
    assert list(timeline.attempts) == [
        Attempt(1.0, 2.0, 3.0, 3.0, 4.0, lost=True),
        Attempt(4.0, 5.0, None, None, 6.0, lost=True),
        Attempt(6.0, None, None, None, 7.0),
    ]


def test_a_slot_given_up_ends_an_attempt_with_its_last_tokens() -> None:
    timeline = Timeline(1.0)
    timeline.admitted(2.0)
    timeline.admitted(3.0)  # gave up before its first token
    timeline.tokens(4.0)
    timeline.admitted(6.0)
    timeline.end(7.0)
    assert list(timeline.attempts) == [
        Attempt(1.0, 2.0, None, None, 2.0),
        Attempt(2.0, 3.0, 4.0, 4.0, 4.0),
        Attempt(4.0, 6.0, None, None, 7.0),
    ]


def test_not_every_attempt_is_kept() -> None:
    timeline = Timeline(0.0)
    for now in range(1, 1000):
        timeline.admitted(float(now))
    assert len(timeline.attempts) < 100
    assert timeline.attempts[-1].admitted_at == 999


def test_tokens_that_are_read_late_are_not_those_of_the_next_attempt() -> None:
    timeline = Timeline(0.0)
    timeline.admitted(1.0)
    timeline.lost(2.0)
    timeline.tokens(2.5)  # were on their way when the workers were lost
    timeline.admitted(3.0)
    timeline.tokens(4.0)
    timeline.end(5.0)
    lost, replay = timeline.attempts
    assert (lost.ended_at, lost.lost) == (2.0, True)
    assert (replay.admitted_at, replay.first_at, replay.ended_at) == (3.0, 4.0, 5.0)
