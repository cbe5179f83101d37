"""Keys and their owners, whose a request is, and how many each may have open."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from surestep_common.errors import PermissionDenied, kind_of
from surestep_gateway.api_keys import ApiClient, Caller, TrustedGateways, may_open, read_keys
from surestep_gateway.settings.config import GatewaySettings

CALLERS = st.sampled_from("abcdefgh")


def settings(**values: object) -> GatewaySettings:
    return GatewaySettings.model_validate({"model": Path("/models/tiny")} | values)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_file_says_whose_keys_they_are(keys: Path) -> None:
    keys.write_text("# ours\n\nk1\n  k2 weight=2.5 name=batch\tpriority=yes  \n")
    first, second = read_keys(keys)
    assert first.key == SecretStr("k1")
    assert first.client == ApiClient(first.client.name, 1.0, may_prioritise=False)
    assert "k1" not in first.client.name
    assert second == (SecretStr("k2"), ApiClient("batch", 2.5, may_prioritise=True))


def test_a_key_names_the_adapters_that_it_may(keys: Path) -> None:
    keys.write_text("k1\nk2 adapters=a,b\nk3 adapters=\n")
    callers = [caller(), *(caller(key.client) for key in read_keys(keys))]
    assert ["".join(filter(one.may_name, "abc")) for one in callers] == ["abc", "abc", "ab", ""]


@pytest.mark.parametrize(
    "line",
    [
        *("hush weight=0", "hush weight=nan", "hush weight=1000", "hush weight", "hush name="),
        *("hush priority=maybe", "hush wait=1", "hush weight=1=2", "hush hush"),
    ],
)
def test_mistakes_name_the_line_and_not_the_key(keys: Path, line: str) -> None:
    keys.write_text(f"k1\n{line}\n")
    with pytest.raises(ValueError, match="line 2: expected KEY") as error:
        settings(api_key_file=keys)
    assert "hush" not in str(error.value).replace("hush hush", "")


def test_a_file_without_keys_is_a_mistake(keys: Path) -> None:
    keys.write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no key"):
        settings(api_key_file=keys)


def test_keys_of_file_and_flag_count_alike(keys: Path) -> None:
    keys.write_text("k1\n")
    known = settings(api_key_file=keys, api_key="k2").api_keys()
    assert known.client(b"Bearer k1") is not None
    assert known.client(b"bearer k2") is not None
    for header in (b"", b"k1", b"Basic k1", b"Bearer k", b"Bearer k11", b"Bearer k1 k2"):
        assert known.client(header) is None


def test_owners_of_keys_share_prefixes_only_when_the_operator_says_so(keys: Path) -> None:
    keys.write_text("k1 name=a\nk2 name=a\nk3 name=b\n")

    def owners(**values: object) -> list[str]:
        known = settings(api_key_file=keys, **values).api_keys()
        clients = [known.client(f"Bearer k{number}".encode()) for number in (1, 2, 3)]
        return [Caller(client, "host").tenant("user").cache_owner for client in clients]

    first, second, third = owners()
    assert first == second
    assert len({first, third, ""}) == 3
    assert owners(share_prefix_cache_between_keys=True) == [""] * 3
    assert Caller(None, "host").tenant("user").cache_owner == ""


def test_metrics_are_protected_by_a_key_or_not_at_all(keys: Path) -> None:
    with pytest.raises(ValueError, match="--protect-metrics needs"):
        settings(protect_metrics=True)
    keys.write_text("k1\n")
    assert settings(protect_metrics=True, admin_api_key_file=keys).admin_keys()


def test_two_admin_keys_are_one_too_many(keys: Path) -> None:
    keys.write_text("k1\n")
    with pytest.raises(ValueError, match="exclude each other"):
        settings(admin_api_key="k", admin_api_key_file=keys)


def caller(client: ApiClient | None = None, host: str = "10.0.0.1") -> Caller:
    return Caller.of({"client": (host, 5000), "state": {"client": client}})


def test_flows_are_those_of_trusted_gateways() -> None:
    """With a key or without; the cache stays its owner's, and the gateway's own headers count."""
    trusted = TrustedGateways(["10.1.0.0/16", "fd00::1"])
    headers = {b"x-llm-d-inference-fairness-id": b"team", b"x-session-id": b"s" * 999}
    assert trusted.named("10.1.2.3", headers) == ("team", "s" * 256)
    assert trusted.named("fd00::1", {b"x-gateway-inference-fairness-id": b"a"}) == ("a", "")
    for stranger in ("10.2.0.1", "", "fd00::2", "/run/socket"):
        assert trusted.named(stranger, headers) == ("", "")
    assert TrustedGateways([]).named("10.1.2.3", headers) == ("", "")
    owner = caller(ApiClient("owner", weight=2.0))
    tenants = {owner._replace(flow=flow).tenant("alice") for flow in ("", "a", "b")}
    assert len(tenants) == 3
    assert {(one.weight, one.cache_owner) for one in tenants} == {(2.0, owner.tenant("").name)}
    assert caller()._replace(flow="a").tenant("alice") == caller()._replace(flow="a").tenant("bob")


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
