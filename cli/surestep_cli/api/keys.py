"""The one key that a command shows to a server."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr
from surestep_common.errors import InvalidRequest
from surestep_gateway.auth.api_keys import read_keys


def one_key(key: SecretStr | None, path: Path | None) -> str | None:
    """`key`, or the first one of the file; None if there is neither. Raises InvalidRequest."""
    if key is not None or path is None:
        return key.get_secret_value() if key is not None else None
    try:
        return read_keys(path)[0].key
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
