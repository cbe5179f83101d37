"""Settings of the tiers behind the KV blocks, vLLM's and LMCache's names for them included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from surestep_common.access import PeerSettings
from surestep_common.config import variables

_CONNECTORS = _LMCACHE, _OFFLOADING = "LMCacheConnectorV1", "OffloadingConnector"
_ROLE = "kv_both"
_STORES = ("redis", "rediss", "unix")
_GIB = 1 << 30


class OffloadingSettings(PeerSettings):
    """Tiers behind the KV blocks: host memory, a folder, a store."""

    kv_offloading_size: float = Field(
        default=0.0,
        ge=0,
        description="GiB of host memory for idle KV blocks, all ranks together",
    )
    kv_offloading_folder: Path | None = Field(
        default=None,
        description="folder for idle KV blocks, which replicas may share",
    )
    kv_offloading_folder_size: float = Field(default=16.0, gt=0, description="GiB in that folder")
    kv_offloading_store: SecretStr | None = Field(
        default=None,
        description="Redis or Valkey for them: redis[s]://USER:PASSWORD@HOST:PORT/DATABASE",
    )
    kv_offloading_store_size: float = Field(default=16.0, gt=0, description="GiB in that store")
    kv_transfer_config: dict[str, Any] | None = Field(
        default=None,
        description="JSON: these tiers by vLLM's OffloadingConnector or LMCacheConnectorV1",
    )

    @field_validator("kv_offloading_store")
    @classmethod
    def _store_is_known(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None and urlsplit(given.get_secret_value()).scheme not in _STORES:
            raise ValueError("expected redis://.., rediss://.. (TLS) or unix://..")
        return given

    @field_validator("kv_transfer_config")
    @classmethod
    def _connector_is_known(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if not given:
            return None
        name, role = given.get("kv_connector"), given.get("kv_role", _ROLE)
        if name not in _CONNECTORS:
            raise ValueError(
                f"kv_connector {name!r} is not served: {_OFFLOADING} and {_LMCACHE} are, as "
                "--kv-offloading-size, --kv-offloading-folder and --kv-offloading-store"
            )
        if role != _ROLE:
            raise ValueError(f"kv_role {role!r} is not served: prompts are computed where text is")
        if given.get("kv_load_failure_policy", "recompute") != "recompute":
            raise ValueError("what cannot be loaded is computed: kv_load_failure_policy recompute")
        return given

    @model_validator(mode="before")
    @classmethod
    def _connector_names_tiers(cls, given: Any) -> Any:
        """Take over what a connector says, where no flag of ours says it."""
        config = given.get("kv_transfer_config") if isinstance(given, dict) else None
        if not isinstance(config, dict) or config.get("kv_connector") not in _CONNECTORS:
            return given
        return _sizes_of(config, variables("LMCACHE_")) | given

    @property
    def has_tiers(self) -> bool:
        """Return whether there is any tier behind the blocks."""
        places = self.kv_offloading_folder, self.kv_offloading_store
        return self.kv_offloading_size > 0 or any(place is not None for place in places)


def _sizes_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return our settings that a connector's configuration stands for. Raises ValueError."""
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError("kv_connector_extra_config is no object")
    if config.get("kv_connector") == _OFFLOADING:
        known = {"cpu_bytes_to_use", "block_size", "eviction_policy", "spec_name"}
        if unknown := set(extra) - known:
            raise ValueError(f"kv_connector_extra_config: {min(unknown)!r} is not served")
        if extra.get("eviction_policy", "lru") != "lru":
            raise ValueError("kv_connector_extra_config: eviction_policy is lru")
        if extra.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec":
            raise ValueError("kv_connector_extra_config: spec_name is CPUOffloadingSpec")
        size = extra.get("cpu_bytes_to_use")
        if size is not None and not isinstance(size, int | float):
            raise ValueError("kv_connector_extra_config: cpu_bytes_to_use is a number of bytes")
        return {"kv_offloading_size": size / _GIB} if size is not None else {}
    return _of_lmcache(environment)


def _of_lmcache(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what LMCache's own variables say; it has memory of 5 GiB by default."""

    def of(name: str, default: str = "") -> str:
        return environment.get(f"LMCACHE_{name}", default)

    if of("CONFIG_FILE"):
        raise ValueError("LMCACHE_CONFIG_FILE is not read: use the variables, or our own flags")
    found = dict[str, Any]()
    if of("LOCAL_CPU", "True").lower() in ("true", "1"):
        found["kv_offloading_size"] = _gib("MAX_LOCAL_CPU_SIZE", of("MAX_LOCAL_CPU_SIZE", "5.0"))
    if folder := of("LOCAL_DISK"):
        found["kv_offloading_folder"] = Path(folder.removeprefix("file://"))
        if size := of("MAX_LOCAL_DISK_SIZE"):
            found["kv_offloading_folder_size"] = _gib("MAX_LOCAL_DISK_SIZE", size)
    if store := of("REMOTE_URL"):
        if urlsplit(store).scheme not in _STORES:
            raise ValueError("LMCACHE_REMOTE_URL: redis://.. and rediss://.. are served")
        found["kv_offloading_store"] = SecretStr(store)
    return found


def _gib(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"LMCACHE_{name} is no number of GiB: {value!r}") from None
