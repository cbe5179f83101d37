"""The connection of a client to its server: address, key, certificates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from surestep_common.errors import InvalidRequest
from surestep_common.rpc import CHANNEL_OPTIONS

Metadata = tuple[tuple[str, str], ...]
Options = Sequence[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files."""

    ca: Path | str | None = None  # that signed the server's certificate; None = the system's
    cert: Path | str | None = None  # of this client, where the server asks for one
    key: Path | str | None = None  # of that certificate
    server_name: str | None = None  # in the server's certificate, where it is not the host called

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel. Raise OSError."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.key),
            certificate_chain=_read(self.cert),
        )


def _read(path: Path | str | None) -> bytes | None:
    return Path(path).read_bytes() if path is not None else None


def target(address: str) -> str:
    """Return `host:port` without `grpc://`, or `unix:/path`. Raise InvalidRequest for another form.

    gRPC would resolve another form with every name service it knows, and retry calls.
    """
    where = address.removeprefix("grpc://")
    host, _, port = where.rpartition(":")
    if where.startswith("unix:/"):
        return where
    if not host or "/" in host or not port.isdecimal():
        raise InvalidRequest(f"must be host:port or unix:/path, got {address!r}", param="address")
    return where


def options(tls: Tls | None) -> Options:
    """Return channel options: keepalive that detects a hanging server, and large messages."""
    if tls is None or tls.server_name is None:
        return CHANNEL_OPTIONS
    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))


def metadata(api_key: str | None) -> Metadata:
    """Return the metadata of every call. Raise InvalidRequest for a key that cannot be sent."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("must be one line of printable ASCII characters", param="api_key")
    return (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
