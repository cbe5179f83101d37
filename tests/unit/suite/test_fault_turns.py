"""Which faults a run of the suite meets: half of the setups, and each fault in one of them."""

from __future__ import annotations

from support.faults.cases import FAULTS, GLM, SETUPS, cases, turn_of


def test_each_fault_once_in_a_share_and_all_in_two() -> None:
    for share in range(12):
        now, then = (
            [fault.name for setup, fault in cases(turn) if setup != GLM]
            for turn in (share, share + 1)
        )
        assert len(now) == len(set(now))
        assert {*now, *then} == {fault.name for fault in FAULTS}


def test_a_share_starts_half_of_the_setups() -> None:
    for share in range(12):
        started = {str(setup) for setup, _ in cases(share)} - {str(GLM)}
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
    of_glm = sum(str(GLM) in fault.setups for fault in FAULTS)
    numbers = sum(len(fault.drafters) * (1 if fault.needs_ranks else 2) for fault in FAULTS)
    assert len(everywhere) == numbers + of_glm


def test_the_model_of_the_founding_report_has_every_fourth_share() -> None:
    met = [[fault.name for setup, fault in cases(share) if setup == GLM] for share in range(8)]
    assert met == [[], met[1], [], []] * 2
    assert {"rank-killed", "drafter-stalls", "kernel-never-ends"} < set(met[1])
    assert {fault.name for fault in FAULTS if fault.needs_ranks} < set(met[1])
