from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from surestep_gateway.auth.api_keys import ApiClient, Caller, read_keys
from surestep_gateway.settings.config import GatewaySettings


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
