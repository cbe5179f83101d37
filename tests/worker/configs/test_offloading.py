"""Tiers by vLLM's and LMCache's names: mapped to ours, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from surestep_worker.config import WorkerSettings

GIB = 1 << 30
OURS = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def settings(**given: Any) -> WorkerSettings:
    return WorkerSettings(model=Path("m"), device="cpu", **given)


def test_there_are_no_tiers_unless_they_are_asked_for(tmp_path: Path) -> None:
    assert not settings().has_tiers
    assert not settings(kv_offloading_size=0, kv_transfer_config={}).has_tiers
    assert settings(kv_offloading_size=1).has_tiers
    assert settings(kv_offloading_folder=tmp_path).has_tiers
    assert settings(kv_offloading_store="rediss://cache").has_tiers


def test_the_offloading_connector_is_host_memory() -> None:
    config = OURS | {"kv_connector_extra_config": {"cpu_bytes_to_use": 3 * GIB, "block_size": 64}}
    assert settings(kv_transfer_config=config).kv_offloading_size == 3
    assert settings(kv_transfer_config=config, kv_offloading_size=2).kv_offloading_size == 2
    assert settings(kv_transfer_config=OURS, kv_offloading_size=2).kv_offloading_size == 2


def test_lmcache_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(kv_transfer_config=LMCACHE).kv_offloading_size == 5
    for name, value in {
        "LOCAL_CPU": "True",
        "MAX_LOCAL_CPU_SIZE": "2.5",
        "LOCAL_DISK": "file:///var/kv",
        "MAX_LOCAL_DISK_SIZE": "7",
        "REMOTE_URL": "redis://:hunter2@cache:6379",
        "CHUNK_SIZE": "256",
    }.items():
        monkeypatch.setenv(f"LMCACHE_{name}", value)
    made = settings(kv_transfer_config=LMCACHE)
    assert (made.kv_offloading_size, made.kv_offloading_folder_size) == (2.5, 7)
    assert made.kv_offloading_folder == Path("/var/kv")
    assert made.kv_offloading_store is not None
    assert "hunter2" not in repr(made)
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "False")
    assert settings(kv_transfer_config=LMCACHE).kv_offloading_size == 0
    assert settings().kv_offloading_folder is None  # without the connector they mean nothing


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "'NixlConnector' is not served"),
        ({"kv_connector": "MooncakeConnector"}, "'MooncakeConnector' is not served"),
        ({"kv_role": "kv_both"}, "None is not served"),
        (OURS | {"kv_role": "kv_producer"}, "kv_role 'kv_producer' is not served"),
        (OURS | {"kv_load_failure_policy": "fail"}, "what cannot be loaded is computed"),
        (OURS | {"kv_connector_extra_config": {"secondary_tiers": []}}, "'secondary_tiers' is not"),
        (
            OURS | {"kv_connector_extra_config": {"eviction_policy": "arc"}},
            "eviction_policy is lru",
        ),
        (OURS | {"kv_connector_extra_config": {"cpu_bytes_to_use": "much"}}, "cpu_bytes_to_use"),
        (OURS | {"kv_connector_extra_config": {"cpu_bytes_to_use": -1}}, "greater than or equal"),
        (OURS | {"kv_connector_extra_config": [1]}, "kv_connector_extra_config"),
    ],
)
def test_other_connectors_are_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(kv_transfer_config=config)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CONFIG_FILE", "lmcache.yaml", "LMCACHE_CONFIG_FILE is not read"),
        ("REMOTE_URL", "lm://cache:65432", "LMCACHE_REMOTE_URL"),
        ("MAX_LOCAL_CPU_SIZE", "much", "LMCACHE_MAX_LOCAL_CPU_SIZE"),
    ],
)
def test_variables_that_are_not_served(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LMCACHE_{name}", value)
    with pytest.raises(ValidationError, match=told):
        settings(kv_transfer_config=LMCACHE)


def test_a_store_has_a_scheme() -> None:
    with pytest.raises(ValidationError, match=r"expected redis://"):
        settings(kv_offloading_store="memcached://cache")
