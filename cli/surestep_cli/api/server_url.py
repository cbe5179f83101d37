"""Settings that all commands share which talk to a running server: its URL and a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, FilePath, SecretStr
from pydantic_settings import EnvSettingsSource, PydanticBaseSettingsSource
from surestep_common.config import ENV_PREFIX, Settings

from .keys import one_key

URL = r"^(https?|unix)://"
URL_IS = "address of the gateway; unix://PATH with %2F for / in it: a Unix socket"


class ServerUrl(Settings):
    """Settings of commands that talk to a running server.

    That is what they read from variables and files too: other names there are settings of servers.
    """

    url: str = Field(default="http://127.0.0.1:8000", pattern=URL, description=URL_IS)
    api_key: SecretStr | None = Field(
        default=None, description="key that the server asks for, if it does"
    )
    api_key_file: FilePath | None = Field(
        default=None, description="file whose first key that is: other users see flags, not files"
    )

    @classmethod
    def sources(
        cls, init: PydanticBaseSettingsSource, env: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return super().sources(init, _Address(cls, env_prefix=ENV_PREFIX))

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return _of_clients(super().from_file(content))

    def key(self) -> SecretStr | None:
        """Return the key to send. Raise InvalidRequest."""
        return one_key(self.api_key, self.api_key_file)


class _Address(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        return _of_clients(super().__call__())


def _of_clients(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ServerUrl.model_fields}
