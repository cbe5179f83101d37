"""Whose a request is, and how many each may have open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surestep_common.errors import PermissionDenied, kind_of
from surestep_gateway.auth.api_keys import ApiClient, Caller, may_open

CALLERS = st.sampled_from("abcdefgh")


def caller(client: ApiClient | None = None, host: str = "10.0.0.1") -> Caller:
    return Caller.of({"client": (host, 5000), "state": {"client": client}})


def test_a_key_is_its_owners_whoever_it_says_it_asks_for() -> None:
    owner = caller(ApiClient("team", weight=3.0))
    assert owner.tenant("alice") == owner.tenant(None)
    assert owner.tenant(None).weight == 3.0
    assert owner.tenant(None) == caller(ApiClient("team", 3.0), "10.9.9.9").tenant(None)
    assert owner.tenant(None) != caller(ApiClient("other", 3.0)).tenant(None)


def test_without_keys_users_are_told_apart_and_then_addresses() -> None:
    assert caller().tenant("alice") != caller().tenant("bob")
    assert caller().tenant("alice") == caller(host="10.0.0.2").tenant("alice")
    assert caller().tenant(None) == caller().tenant("")
    assert caller().tenant(None) != caller(host="10.0.0.2").tenant(None)
    assert Caller.of({}).tenant(None) == Caller.of({"client": None}).tenant(None)


def test_nobody_poses_as_another() -> None:
    names = [
        caller(ApiClient("10.0.0.1")).tenant(None),
        caller().tenant("10.0.0.1"),
        caller().tenant(None),
        caller().tenant("key 10.0.0.1"),
    ]
    assert len({tenant.name for tenant in names}) == 4
    assert {len(tenant.name) for tenant in (*names, caller().tenant("x" * 100_000))} == {32}


def test_priorities_are_for_keys_that_may() -> None:
    for may in (caller(), caller(ApiClient("a")), caller(ApiClient("a", may_prioritise=True))):
        may.check_priority(-5)
    barred = caller(ApiClient("a", may_prioritise=False))
    barred.check_priority(None)
    barred.check_priority(0)
    with pytest.raises(PermissionDenied) as refusal:
        barred.check_priority(1)
    kind = kind_of(refusal.value)
    assert (kind.http_status, kind.openai_type) == (403, "permission_error")
    assert refusal.value.param == "priority"


@given(opened=st.lists(CALLERS, max_size=40), who=CALLERS, limit=st.integers(1, 20))
def test_a_fair_share_of_the_places_is_there_for_everybody(
    opened: list[str], who: str, limit: int
) -> None:
    may = may_open(opened, who, limit)
    if len(opened) < limit:
        assert may
    if len(opened) >= 2 * limit:
        assert not may
    elif who not in opened:
        assert may
    elif opened.count(who) >= limit:
        assert not may
