"""Access to the gRPC services, for calls that carry the secret that all processes share.

The secret travels as metadata, `authorization: Bearer ...`, with every call that a process makes,
and every service demands it. A service may admit further keys to some of its methods. Health checks
stay open: who asks (kubelet, Docker, watchdogs) need not know a secret, and learns nothing but
whether a service serves.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2
from pydantic import Field, FilePath, SecretStr, model_validator

from . import addresses, tls
from .tls import TlsSettings

logger = logging.getLogger(__name__)

_KEY = "authorization"
_SCHEME = "bearer"
_MIN_LENGTH = 16  # characters of a secret
_OPEN = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"

Metadata = tuple[tuple[str, str], ...]


class PeerSettings(TlsSettings):
    """Settings of a process that speaks gRPC with the others."""

    grpc_secret: SecretStr | None = Field(
        default=None,
        description="secret of gateway, scheduler and workers; `surestep serve` draws one at "
        "every start",
    )
    grpc_secret_file: FilePath | None = Field(
        default=None, description="file with that secret, in place of --grpc-secret"
    )

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if self.grpc_secret is not None and self.grpc_secret_file is not None:
            raise ValueError("--grpc-secret and --grpc-secret-file exclude each other")
        self.read_grpc_secret()
        return self

    def read_grpc_secret(self) -> str | None:
        """Return the secret of its setting or file. Raises ValueError unless it is a good one."""
        if self.grpc_secret_file is not None:
            return _checked(_read(self.grpc_secret_file), str(self.grpc_secret_file))
        if self.grpc_secret is not None:
            return _checked(self.grpc_secret.get_secret_value(), "--grpc-secret")
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _checked(secret: str, source: str) -> str:
    if len(secret) < _MIN_LENGTH or not secret.isascii() or not secret.isprintable():
        raise ValueError(f"{source} must hold one line of {_MIN_LENGTH} or more ASCII characters")
    return secret


secret: ContextVar[str | None] = ContextVar("secret", default=None)  # None = everybody may call


def use(settings: PeerSettings) -> None:
    """Set TLS and the secret once, before the first server or channel. Raises OSError."""
    tls.use(settings)
    secret.set(settings.read_grpc_secret())


def credentials() -> Metadata:
    """Return the metadata of this process's calls; empty without a secret."""
    known = secret.get()
    return ((_KEY, f"Bearer {known}"),) if known is not None else ()


def alive_method() -> str | None:
    """Return the path of a method that only those who know the secret can name; None without one.

    gRPC queues the calls of each method by themselves, so no stranger's call is in front of one.
    """
    known = secret.get()
    if known is None:
        return None
    return f"/surestep.Alive/{hashlib.sha256(b'alive ' + known.encode()).hexdigest()}"


class Gate:
    """Decides which calls a server of this process takes.

    `guests` maps methods, `/package.Service/Method`, to keys that are as good as the secret there;
    those in `public` take calls from anybody.
    """

    def __init__(self, guests: Mapping[str, Sequence[str]], public: Collection[str] = ()) -> None:
        known = secret.get()
        self._secret = [known.encode()] if known is not None else []
        self._public = frozenset(public)
        self._guests = {method: [key.encode() for key in keys] for method, keys in guests.items()}

    @property
    def open(self) -> bool:
        """Return whether every call is taken whose method needs no key of its own."""
        return not self._secret

    def admits(self, details: grpc.HandlerCallDetails) -> bool:
        """Return whether a call may be served."""
        method = details.method
        guests = self._guests.get(method, [])
        if method.startswith(_OPEN) or method in self._public or not (self._secret or guests):
            return True
        return shown_key(details.invocation_metadata, [*self._secret, *guests]) is not None

    def is_strangers(self, details: grpc.HandlerCallDetails) -> bool:
        """Return whether an admitted call is a health check that needs no secret."""
        shown = shown_key(details.invocation_metadata, self._secret)
        return details.method.startswith(_OPEN) and shown is None


def shown_key(metadata: Any, keys: Sequence[bytes]) -> int | None:
    """Return which of the keys a call with this metadata shows, None for none of them."""
    headers = [_bytes(value) for name, value in metadata or () if name == _KEY]
    found = (bearer_index(header, keys) for header in headers)
    return next((index for index in found if index is not None), None)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def bearer_index(header: bytes, keys: Sequence[bytes]) -> int | None:
    """Return which key an Authorization header carries, in the same time for any wrong key."""
    scheme, _, given = header.partition(b" ")
    matches = [hmac.compare_digest(given.strip(), key) for key in keys]
    known = scheme.lower() == _SCHEME.encode() and any(matches)
    return matches.index(True) if known else None


def warn_if_exposed(address: str) -> None:
    """Log a line for a server that takes calls from its whole network."""
    files = tls.current.get()
    mutual = files is not None and files.ca is not None
    if secret.get() is None and not mutual and not is_local(address):
        logger.warning(
            "%s takes calls from anyone who reaches it: --grpc-secret or --grpc-tls-ca closes it",
            address,
        )


def is_local(address: str) -> bool:
    """Return whether only this machine reaches a server that listens there."""
    return address.startswith(addresses.UNIX) or is_loopback(addresses.split(address)[0])


def is_loopback(host: str) -> bool:
    """Return whether a name or an address, also in brackets, means this machine to itself."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost" or bare.endswith(".localhost")


def _call(
    multi_callable: Callable[..., Any],
    known: Metadata,
    *args: Any,
    metadata: Metadata = (),
    **kwargs: Any,
) -> Any:
    return multi_callable(*args, metadata=(*known, *metadata), **kwargs)


class BearerChannel(grpc.aio.Channel):
    """A channel all of whose calls carry the same metadata, besides their own.

    Interceptors could add it too, but would stand between every plan and its stream.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def _with_metadata(self, multi_callable: Callable[..., Any]) -> Any:
        return partial(_call, multi_callable, self._metadata)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; calls under way have `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connection's state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
