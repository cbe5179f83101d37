"""The search for a request that ends the workers, loss by loss."""

from __future__ import annotations

from surestep_scheduler.sequence import CANARY
from surestep_scheduler.suspicion import NO_LOSS, OUTSIDE_LOSS, Suspicion, Window

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


def test_a_signal_during_a_lone_trial_is_no_verdict() -> None:
    suspicion = Suspicion()
    for _ in range(3):
        lose(suspicion, "a")
    for _ in range(7):
        suspicion.lost({"a": Window(8, 10)}, OUTSIDE_LOSS)
    assert not suspicion.needs_canary
    assert allowed(suspicion) == "a"
