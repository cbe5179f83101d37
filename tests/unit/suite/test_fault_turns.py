"""Which faults a run of the suite meets: each once, in a setup that changes from commit to commit."""

from __future__ import annotations

from support.faults.cases import FAULTS, cases


def test_each_fault_once_in_every_share() -> None:
    for share in range(6):
        assert sorted(fault.name for _, fault in cases(share)) == sorted(f.name for f in FAULTS)


def test_the_setups_of_a_fault_take_turns() -> None:
    met = {(str(setup), fault.name) for share in range(6) for setup, fault in cases(share)}
    assert met == {(setup, fault.name) for fault in FAULTS for setup in fault.setups}


def test_in_full_a_fault_is_met_by_all_whom_it_concerns() -> None:
    everywhere = [(setup, fault) for setup, fault in cases(None)]
    assert len(everywhere) == 2 * sum(len(fault.drafters) for fault in FAULTS)
