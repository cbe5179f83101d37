"""Which faults a run of the suite meets: half of the setups, and each fault in one of them."""

from __future__ import annotations

from support.faults.cases import FAULTS, SETUPS, cases, turn_of


def test_each_fault_once_in_a_share_and_all_in_two() -> None:
    for share in range(12):
        now, then = ([fault.name for _, fault in cases(turn)] for turn in (share, share + 1))
        assert len(now) == len(set(now))
        assert {*now, *then} == {fault.name for fault in FAULTS}


def test_a_share_starts_half_of_the_setups() -> None:
    for share in range(12):
        started = {str(setup) for setup, _ in cases(share)}
        assert started == {str(setup) for setup in SETUPS if turn_of(str(setup)) == share % 2}
        assert len(started) == 3


def test_whoever_computes_or_plans_is_killed_in_every_share() -> None:
    for share in range(12):
        assert {"rank-killed", "scheduler-killed"} <= {fault.name for _, fault in cases(share)}


def test_the_setups_of_a_fault_take_turns() -> None:
    met = {(str(setup), fault.name) for share in range(12) for setup, fault in cases(share)}
    assert met == {(setup, fault.name) for fault in FAULTS for setup in fault.setups}


def test_in_full_a_fault_is_met_by_all_whom_it_concerns() -> None:
    everywhere = [(setup, fault) for setup, fault in cases(None)]
    assert len(everywhere) == 2 * sum(len(fault.drafters) for fault in FAULTS)
