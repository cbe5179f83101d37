from __future__ import annotations

from surestep_common.tenants import may_enter


def test_a_share_of_a_full_queue_is_there_for_everybody() -> None:
    assert may_enter(held=9, more=1, total=9, bound=10, share=5)
    assert not may_enter(held=10, more=1, total=10, bound=10, share=5)
    assert may_enter(held=4, more=1, total=14, bound=10, share=5)
    assert not may_enter(held=5, more=1, total=15, bound=10, share=5)
    assert may_enter(held=0, more=10, total=10, bound=10, share=1)
    assert not may_enter(held=0, more=11, total=10, bound=10, share=1)
