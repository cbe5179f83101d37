"""The search for a request that ends the workers, loss by loss."""

from __future__ import annotations

import pytest
from fake_loop import FakeLoop
from fake_model import FakeModel
from surestep_scheduler.engine.epoch import under_way
from surestep_scheduler.policy.schedule import schedule
from surestep_scheduler.recovery.poison import CANARY, NO_LOSS, OUTSIDE_LOSS, Suspicion, Window

NAMES = "abcdefgh"


def allowed(suspicion: Suspicion, names: str = NAMES) -> str:
    return "".join(filter(suspicion.allows, names))


def lose(suspicion: Suspicion, names: str, low: int = 8, high: int = 10) -> None:
    suspicion.lost(dict.fromkeys(names, Window(low, high)))


def test_all_are_admitted_after_a_first_loss() -> None:
    suspicion = Suspicion()
    lose(suspicion, NAMES)
    assert allowed(suspicion) == NAMES
    assert suspicion.active


def test_a_trial_is_halved_until_one_is_alone() -> None:
    suspicion, trials = Suspicion(), []
    lose(suspicion, NAMES)
    for _ in range(4):
        lose(suspicion, allowed(suspicion))
        trials.append(allowed(suspicion, NAMES + "x"))
    assert trials == ["abcdx", "abx", "a", "a"]


def test_guilty_is_who_ends_the_workers_alone_when_the_canary_does_not() -> None:
    suspicion = Suspicion()
    for _ in range(4):
        assert not suspicion.needs_canary
        lose(suspicion, "a")
    assert suspicion.needs_canary
    assert [name for name in ["a", "x", CANARY] if suspicion.allows(name)] == [CANARY]
    assert suspicion.applied({CANARY: 1}) is None
    suspicion.canary_lived()
    assert suspicion.applied({}) == "a"
    assert suspicion.num_losses("a") == 4
    suspicion.close("a")
    assert not suspicion.active
    assert allowed(suspicion) == NAMES


def test_nobody_is_guilty_when_the_canary_ends_the_workers_too() -> None:
    suspicion = Suspicion()
    for _ in range(4):
        lose(suspicion, "a")
    suspicion.lost({CANARY: Window(0, 1)})
    assert not suspicion.active
    assert not suspicion.needs_canary
    assert suspicion.applied({"a": 1}) is None


def test_those_that_get_past_make_way_for_the_next_group() -> None:
    suspicion = Suspicion()
    lose(suspicion, NAMES)
    lose(suspicion, NAMES)
    assert suspicion.applied(dict.fromkeys("abcd", 10)) is None
    assert allowed(suspicion) == "abcd"
    suspicion.applied(dict.fromkeys("abc", 11))
    assert allowed(suspicion) == "abcd"
    suspicion.close("d")  # its client has gone
    assert allowed(suspicion) == NAMES
    lose(suspicion, NAMES)
    assert allowed(suspicion) == "abcdef"  # the first half did not run into it


def test_a_loss_while_nothing_ran_accuses_nobody() -> None:
    suspicion = Suspicion()
    lose(suspicion, NAMES)
    suspicion.lost({})
    assert allowed(suspicion) == NAMES
    suspicion.lost({CANARY: Window(0, 1)})
    lose(suspicion, NAMES)
    assert allowed(suspicion) == "abcd"


def test_newcomers_are_suspects_only_after_their_second_loss() -> None:
    suspicion = Suspicion()
    lose(suspicion, "ab")
    lose(suspicion, "abx")
    assert allowed(suspicion, "abxy") == "a"  # alone: nobody else can be blamed
    suspicion.applied({"a": 11})
    assert allowed(suspicion, "abxy") == "abxy"
    lose(suspicion, "bxy")
    assert allowed(suspicion, "abxy") == "b"
    suspicion.applied({"b": 11})
    assert allowed(suspicion, "abxy") == "abxy"


def test_one_lone_loss_may_be_chance() -> None:
    suspicion = Suspicion()
    for _ in range(3):
        lose(suspicion, "a")
    suspicion.applied({"a": 11})
    lose(suspicion, "a")
    assert not suspicion.needs_canary
    assert allowed(suspicion) == NAMES


def test_losses_at_different_positions_have_nothing_in_common() -> None:
    suspicion = Suspicion()
    lose(suspicion, NAMES, 0, 10)
    lose(suspicion, NAMES, 11, 20)
    assert allowed(suspicion) == NAMES
    lose(suspicion, NAMES, 15, 25)
    assert allowed(suspicion) == "abcd"
    suspicion.applied(dict.fromkeys("abcd", 21))  # 15 to 20 is what they had in common
    assert allowed(suspicion) == NAMES
    lose(suspicion, "e", 15, 20)
    assert allowed(suspicion) == "e"
    lose(suspicion, "e", 30, 40)
    lose(suspicion, "e", 30, 40)
    lose(suspicion, "e", 30, 40)
    assert not suspicion.needs_canary


def test_what_others_signals_did_counts_an_eighth() -> None:
    suspicion = Suspicion()
    for _ in range(7):
        suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert suspicion.num_losses("a") == 0
    for _ in range(8):
        suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert suspicion.num_losses("a") == 1
    lose(suspicion, "a")
    assert suspicion.num_losses("a") == 2


def test_signals_between_crashes_make_them_no_worse() -> None:
    """Seven signals and a crash are one loss; the eighth signal makes the next."""
    suspicion = Suspicion()
    for _ in range(7):
        suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    lose(suspicion, NAMES)
    assert [suspicion.num_losses(name) for name in "ab"] == [1, 1]
    assert allowed(suspicion) == NAMES
    suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert [suspicion.num_losses(name) for name in "ab"] == [2, 1]
    assert suspicion.trial == ["a"]


@pytest.mark.parametrize("weight", [NO_LOSS, OUTSIDE_LOSS])
def test_a_trial_is_where_it_was_when_somebody_else_ends_the_workers(weight: int) -> None:
    suspicion = Suspicion()
    lose(suspicion, NAMES)
    lose(suspicion, NAMES)
    for _ in range(7):
        suspicion.lost(dict.fromkeys("abcd", Window(8, 10)), weight)
        assert allowed(suspicion) == "abcd"
    lose(suspicion, "abcd")
    assert allowed(suspicion, "abcd") == "ab"


@pytest.mark.parametrize("weight", [NO_LOSS, OUTSIDE_LOSS])
def test_a_canary_that_somebody_else_ends_is_asked_again(weight: int) -> None:
    suspicion = Suspicion()
    for _ in range(4):
        lose(suspicion, "a")
    for _ in range(7):
        suspicion.lost({CANARY: Window(0, 1)}, weight)
        assert suspicion.needs_canary
    suspicion.canary_lived()
    assert suspicion.applied({}) == "a"


def test_what_no_step_explains_accuses_nobody() -> None:
    suspicion = Suspicion()
    for _ in range(99):
        suspicion.lost({"a": Window(8, 10)}, NO_LOSS)
    assert not suspicion.active


def test_alone_it_is_tried_in_another_shape_before_it_is_blamed() -> None:
    suspicion, shapes = Suspicion(), []
    for _ in range(4):
        assert not suspicion.needs_canary
        lose(suspicion, "a")
        shapes.append(suspicion.reshapes("a"))
    assert shapes == [False, False, True, True]
    assert suspicion.needs_canary
    assert not suspicion.reshapes("x")


def test_who_gets_past_in_another_shape_is_not_to_blame() -> None:
    suspicion = Suspicion()
    for _ in range(3):
        lose(suspicion, "a")
    assert suspicion.reshapes("a")
    assert suspicion.applied({"a": 11}) is None
    assert not suspicion.active
    assert not suspicion.reshapes("a")


def test_past_the_spot_in_another_shape_it_is_like_anybody() -> None:
    """And has to be found anew where it ends the workers later."""
    suspicion = Suspicion()
    for _ in range(3):
        lose(suspicion, "a")
    suspicion.applied({"a": 11})
    shapes = []
    for _ in range(4):
        assert not suspicion.needs_canary
        lose(suspicion, "a", 20, 22)
        shapes.append(suspicion.reshapes("a"))
    assert shapes == [False, False, True, True]
    assert suspicion.num_losses("a") == 4


def test_another_shape_has_no_drafts_and_short_chunks() -> None:
    """In the plans of an epoch that no result comes from; until then a trial is as usual."""
    loop, shapes = FakeLoop(FakeModel(max_draft_tokens=3)), []
    loop.add(list(range(1, 31)), 40)
    for _ in range(4):
        plans = [schedule(loop.state, now=0.0) for _ in range(6)]
        shapes.append(
            [
                (int(plan.rows.num_tokens[0]), int(plan.rows.max_drafts[0]))
                for plan in plans
                if plan is not None
            ]
        )
        windows = under_way(loop.state)
        loop.fence()
        loop.state.suspicion.lost(windows)
    usual, other = [(30, 0)] + 5 * [(0, 3)], 3 * [(10, 0)] + 3 * [(0, 0)]
    assert shapes == [usual, usual, usual, other]


def test_after_many_losses_in_vain_they_are_tried_one_by_one() -> None:
    suspicion = Suspicion()
    for number in range(24):
        assert allowed(suspicion) != "c", number
        lose(suspicion, "abc", 20 * (number % 2), 20 * (number % 2) + 10)  # nothing in common
    assert allowed(suspicion, "abcx") == "c"
    suspicion.applied({"c": 30})
    assert allowed(suspicion, "abcx") == "c"  # not past all that it had come to
    suspicion.applied({"c": 31})
    assert allowed(suspicion, "abcx") == "b"
    for _ in range(4):  # as many as a verdict takes otherwise
        assert not suspicion.needs_canary
        lose(suspicion, "b", 25, 35)
    assert suspicion.needs_canary
    suspicion.canary_lived()
    assert suspicion.applied({}) == "b"
    suspicion.close("b")
    assert allowed(suspicion, "abcx") == "a"
    suspicion.close("a")  # its client has gone
    assert allowed(suspicion, "cx") == "cx"
    assert not suspicion.active


def test_a_signal_during_a_lone_trial_is_no_verdict() -> None:
    suspicion = Suspicion()
    for _ in range(3):
        lose(suspicion, "a")
    for _ in range(7):
        suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert not suspicion.needs_canary
    assert allowed(suspicion) == "a"
