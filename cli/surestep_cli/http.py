"""One small HTTP GET, so that the launcher needs no client library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Status and parsed JSON body (None when it is no JSON object)."""

    status: int
    body: dict[str, Any] | None


def get(url: str, *, api_key: str | None = None, timeout_s: float = 2.0) -> Answer:
    """Raises OSError when nothing answers; every HTTP status is an answer."""
    request = urllib.request.Request(url)  # noqa: S310  # the scheme is checked in the settings
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    # No proxies: the launcher asks the loopback interface.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Answer(response.status, _parse(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _parse(error.read()))


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
