"""The API key that a command sends."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr
from surestep_common.errors import InvalidRequest
from surestep_gateway.auth.api_keys import read_keys


def one_key(key: SecretStr | None, path: Path | None) -> SecretStr | None:
    """Return `key`, or the first key of the file; None without either. Raise InvalidRequest."""
    if key is not None or path is None:
        return key
    try:
        return read_keys(path)[0].key
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
