"""The search for a request that ends the workers, loss by loss."""

from __future__ import annotations

import pytest
from support.fakes.loop import FakeLoop
from support.fakes.model import FakeModel
from surestep_scheduler.core.poison import CANARY, NO_LOSS, OUTSIDE_LOSS, PoisonSearch, Window
from surestep_scheduler.engine.epoch import under_way
from surestep_scheduler.policy.schedule import schedule

NAMES = "abcdefgh"


def allowed(poison: PoisonSearch, names: str = NAMES) -> str:
    return "".join(filter(poison.allows, names))


def lose(poison: PoisonSearch, names: str, low: int = 8, high: int = 10) -> None:
    poison.lost(dict.fromkeys(names, Window(low, high)))


def test_all_are_admitted_after_a_first_loss() -> None:
    poison = PoisonSearch()
    lose(poison, NAMES)
    assert allowed(poison) == NAMES
    assert poison.active


def test_a_trial_is_halved_until_one_is_alone() -> None:
    poison, trials = PoisonSearch(), []
    lose(poison, NAMES)
    for _ in range(4):
        lose(poison, allowed(poison))
        trials.append(allowed(poison, NAMES + "x"))
    assert trials == ["abcdx", "abx", "a", "a"]


def test_guilty_is_who_ends_the_workers_alone_when_the_canary_does_not() -> None:
    poison = PoisonSearch()
    for _ in range(4):
        assert not poison.needs_canary
        lose(poison, "a")
    assert poison.needs_canary
    assert [name for name in ["a", "x", CANARY] if poison.allows(name)] == [CANARY]
    assert poison.applied({CANARY: 1}) is None
    poison.canary_lived()
    assert poison.applied({}) == "a"
    assert poison.num_losses("a") == 4
    poison.close("a")
    assert not poison.active
    assert allowed(poison) == NAMES


def test_nobody_is_guilty_when_the_canary_ends_the_workers_too() -> None:
    poison = PoisonSearch()
    for _ in range(4):
        lose(poison, "a")
    poison.lost({CANARY: Window(0, 1)})
    assert not poison.active
    assert not poison.needs_canary
    assert poison.applied({"a": 1}) is None


def test_those_that_get_past_make_way_for_the_next_group() -> None:
    poison = PoisonSearch()
    lose(poison, NAMES)
    lose(poison, NAMES)
    assert poison.applied(dict.fromkeys("abcd", 10)) is None
    assert allowed(poison) == "abcd"
    poison.applied(dict.fromkeys("abc", 11))
    assert allowed(poison) == "abcd"
    poison.close("d")  # its client has gone
    assert allowed(poison) == NAMES
    lose(poison, NAMES)
    assert allowed(poison) == "abcdef"  # the first half did not run into it


def test_a_loss_while_nothing_ran_accuses_nobody() -> None:
    poison = PoisonSearch()
    lose(poison, NAMES)
    poison.lost({})
    assert allowed(poison) == NAMES
    poison.lost({CANARY: Window(0, 1)})
    lose(poison, NAMES)
    assert allowed(poison) == "abcd"


def test_newcomers_are_suspects_only_after_their_second_loss() -> None:
    poison = PoisonSearch()
    lose(poison, "ab")
    lose(poison, "abx")
    assert allowed(poison, "abxy") == "a"  # alone: nobody else can be blamed
    poison.applied({"a": 11})
    assert allowed(poison, "abxy") == "abxy"
    lose(poison, "bxy")
    assert allowed(poison, "abxy") == "b"
    poison.applied({"b": 11})
    assert allowed(poison, "abxy") == "abxy"


def test_one_lone_loss_may_be_chance() -> None:
    poison = PoisonSearch()
    for _ in range(3):
        lose(poison, "a")
    poison.applied({"a": 11})
    lose(poison, "a")
    assert not poison.needs_canary
    assert allowed(poison) == NAMES


def test_losses_at_different_positions_have_nothing_in_common() -> None:
    poison = PoisonSearch()
    lose(poison, NAMES, 0, 10)
    lose(poison, NAMES, 11, 20)
    assert allowed(poison) == NAMES
    lose(poison, NAMES, 15, 25)
    assert allowed(poison) == "abcd"
    poison.applied(dict.fromkeys("abcd", 21))  # 15 to 20 is what they had in common
    assert allowed(poison) == NAMES
    lose(poison, "e", 15, 20)
    assert allowed(poison) == "e"
    lose(poison, "e", 30, 40)
    lose(poison, "e", 30, 40)
    lose(poison, "e", 30, 40)
    assert not poison.needs_canary


def test_what_others_signals_did_counts_an_eighth() -> None:
    poison = PoisonSearch()
    for _ in range(7):
        poison.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert poison.num_losses("a") == 0
    for _ in range(8):
        poison.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert poison.num_losses("a") == 1
    lose(poison, "a")
    assert poison.num_losses("a") == 2


def test_signals_between_crashes_make_them_no_worse() -> None:
    """Seven signals and a crash are one loss; the eighth signal makes the next."""
    poison = PoisonSearch()
    for _ in range(7):
        poison.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    lose(poison, NAMES)
    assert [poison.num_losses(name) for name in "ab"] == [1, 1]
    assert allowed(poison) == NAMES
    poison.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert [poison.num_losses(name) for name in "ab"] == [2, 1]
    assert poison.candidates == ["a"]


@pytest.mark.parametrize("weight", [NO_LOSS, OUTSIDE_LOSS])
def test_a_trial_is_where_it_was_when_somebody_else_ends_the_workers(weight: int) -> None:
    poison = PoisonSearch()
    lose(poison, NAMES)
    lose(poison, NAMES)
    for _ in range(7):
        poison.lost(dict.fromkeys("abcd", Window(8, 10)), weight)
        assert allowed(poison) == "abcd"
    lose(poison, "abcd")
    assert allowed(poison, "abcd") == "ab"


@pytest.mark.parametrize("weight", [NO_LOSS, OUTSIDE_LOSS])
def test_a_canary_that_somebody_else_ends_is_asked_again(weight: int) -> None:
    poison = PoisonSearch()
    for _ in range(4):
        lose(poison, "a")
    for _ in range(7):
        poison.lost({CANARY: Window(0, 1)}, weight)
        assert poison.needs_canary
    poison.canary_lived()
    assert poison.applied({}) == "a"


def test_what_no_step_explains_accuses_nobody() -> None:
    poison = PoisonSearch()
    for _ in range(99):
        poison.lost({"a": Window(8, 10)}, NO_LOSS)
    assert not poison.active


def test_alone_it_is_tried_in_another_shape_before_it_is_blamed() -> None:
    poison, shapes = PoisonSearch(), []
    for _ in range(4):
        assert not poison.needs_canary
        lose(poison, "a")
        shapes.append(poison.reshapes("a"))
    assert shapes == [False, False, True, True]
    assert poison.needs_canary
    assert not poison.reshapes("x")


def test_who_gets_past_in_another_shape_is_not_to_blame() -> None:
    poison = PoisonSearch()
    for _ in range(3):
        lose(poison, "a")
    assert poison.reshapes("a")
    assert poison.applied({"a": 11}) is None
    assert not poison.active
    assert not poison.reshapes("a")


def test_past_the_spot_in_another_shape_it_is_like_anybody() -> None:
    """And has to be found anew where it ends the workers later."""
    poison = PoisonSearch()
    for _ in range(3):
        lose(poison, "a")
    poison.applied({"a": 11})
    shapes = []
    for _ in range(4):
        assert not poison.needs_canary
        lose(poison, "a", 20, 22)
        shapes.append(poison.reshapes("a"))
    assert shapes == [False, False, True, True]
    assert poison.num_losses("a") == 4


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
        loop.state.poison.lost(windows)
    usual, other = [(30, 0)] + 5 * [(0, 3)], 3 * [(10, 0)] + 3 * [(0, 0)]
    assert shapes == [usual, usual, usual, other]


def test_after_many_losses_in_vain_they_are_tried_one_by_one() -> None:
    poison = PoisonSearch()
    for number in range(24):
        assert allowed(poison) != "c", number
        lose(poison, "abc", 20 * (number % 2), 20 * (number % 2) + 10)  # nothing in common
    assert allowed(poison, "abcx") == "c"
    poison.applied({"c": 30})
    assert allowed(poison, "abcx") == "c"  # not past all that it had come to
    poison.applied({"c": 31})
    assert allowed(poison, "abcx") == "b"
    for _ in range(4):  # as many as a verdict takes otherwise
        assert not poison.needs_canary
        lose(poison, "b", 25, 35)
    assert poison.needs_canary
    poison.canary_lived()
    assert poison.applied({}) == "b"
    poison.close("b")
    assert allowed(poison, "abcx") == "a"
    poison.close("a")  # its client has gone
    assert allowed(poison, "cx") == "cx"
    assert not poison.active


def test_a_signal_during_a_lone_trial_is_no_verdict() -> None:
    poison = PoisonSearch()
    for _ in range(3):
        lose(poison, "a")
    for _ in range(7):
        poison.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert not poison.needs_canary
    assert allowed(poison) == "a"
