"""Which faults a run of the suite meets: a third of the setups, and each fault in one of them."""

from __future__ import annotations

from support.faults.cases import FAULTS, GLM, cases


def test_each_fault_once_in_a_share_and_all_in_three() -> None:
    for share in range(12):
        shares = [
            [fault.name for setup, fault in cases(turn) if setup != GLM]
            for turn in range(share, share + 3)
        ]
        assert all(len(names) == len(set(names)) for names in shares)
        assert set().union(*shares) == {fault.name for fault in FAULTS}
