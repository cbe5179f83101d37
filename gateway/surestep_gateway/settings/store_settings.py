"""Settings of stored responses."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, SecretStr
from surestep_common.access import PeerSettings
from surestep_common.config import Size

_SCHEMES = ("redis://", "rediss://", "unix://")


def _known(given: SecretStr) -> SecretStr:
    where = given.get_secret_value()
    if where not in ("memory", "none") and not where.startswith(_SCHEMES):
        raise ValueError("must be memory, none, or a URL that begins with redis:// or rediss://")
    return given


class StoreSettings(PeerSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    responses_store: Annotated[SecretStr, AfterValidator(_known)] = Field(
        SecretStr("memory"),
        description="store of /v1/responses: memory, none, or a Redis or Valkey server, "
        "redis://HOST:PORT/DATABASE",
    )
    responses_store_ttl: PositiveFloat = Field(
        86400.0, description="seconds that a response is stored"
    )
    responses_store_bytes: Size = Field(
        256 << 20,
        description="bytes of responses in memory; beyond, the owner with most loses its oldest",
    )
