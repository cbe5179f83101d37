"""Which faults a run of the suite meets: half of the setups, and each fault in one of them."""

from __future__ import annotations

from support.faults.cases import FAULTS, GLM, cases


def test_each_fault_once_in_a_share_and_all_in_two() -> None:
    for share in range(12):
        now, then = (
            [fault.name for setup, fault in cases(turn) if setup != GLM]
            for turn in (share, share + 1)
        )
        assert len(now) == len(set(now))
        assert {*now, *then} == {fault.name for fault in FAULTS}
