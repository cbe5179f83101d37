"""Sessions of the asynchronous HTTP client with a server, over TCP or a Unix socket."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from surestep_common.tls import context_of_client

from .http import api_root, unix_socket

_MAX_LINE_BYTES = 1 << 20  # a chunk with many logprobs passes aiohttp's 64 KiB


def open_session(
    url: str,
    *,
    api_key: str | None = None,
    timeout: aiohttp.ClientTimeout,
    certificate: Path | None = None,
) -> aiohttp.ClientSession:
    """Open a session for concurrent requests to paths below `url`; `certificate` as for `call`."""
    socket = unix_socket(url)
    tls = context_of_client(certificate) if certificate is not None else True
    return aiohttp.ClientSession(
        base_url=f"{api_root(url)}/" if socket is None else "http://localhost/",
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0, ssl=tls)
        if socket is None
        else aiohttp.UnixConnector(socket, limit=0),
        read_bufsize=_MAX_LINE_BYTES,
    )
