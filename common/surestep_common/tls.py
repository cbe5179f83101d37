"""TLS between the services: one set of files for everything a process serves and calls.

With a certificate and key, every gRPC server and channel of the process speaks TLS. With a CA as
well it is mutual: both sides must show a certificate that the CA has signed.
"""

from __future__ import annotations

import ssl
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, Self

import grpc
from pydantic import Field, FilePath, model_validator

from .config import Settings


class TlsSettings(Settings):
    """Settings of a process that speaks gRPC."""

    grpc_tls_cert: FilePath | None = Field(
        default=None, description="PEM file: certificate of this process for gRPC, and its chain"
    )
    grpc_tls_key: FilePath | None = Field(
        default=None, description="PEM file: private key of that certificate"
    )
    grpc_tls_ca: FilePath | None = Field(
        default=None,
        description="PEM file: authorities that may sign the certificate of the other side",
    )
    grpc_tls_server_name: str | None = Field(
        default=None, description="name in the certificates of servers; none = the host called"
    )

    @model_validator(mode="after")
    def _certificates_are_complete(self) -> Self:
        if (self.grpc_tls_cert is None) != (self.grpc_tls_key is None):
            raise ValueError("--grpc-tls-cert and --grpc-tls-key need each other")
        if self.grpc_tls_ca is not None and self.grpc_tls_cert is None:
            raise ValueError("--grpc-tls-ca needs --grpc-tls-cert and --grpc-tls-key")
        return self


class TlsCredentials(NamedTuple):
    """Contents of the files."""

    cert: bytes
    key: bytes
    ca: bytes | None
    server_name: str | None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of servers; with a CA, clients without a certificate are refused."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)],
            root_certificates=self.ca,
            require_client_auth=self.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of channels; without a CA, servers are judged by the system's."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca,
            private_key=self.key if self.ca else None,
            certificate_chain=self.cert if self.ca else None,
        )

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Return the channel options that go with the credentials."""
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


current: ContextVar[TlsCredentials | None] = ContextVar("tls", default=None)  # None = plaintext


def use(settings: TlsSettings) -> None:
    """Read the files, once per process, before the first server or channel. Raises OSError."""
    if settings.grpc_tls_cert is None or settings.grpc_tls_key is None:
        return
    ca = settings.grpc_tls_ca
    current.set(
        TlsCredentials(
            cert=settings.grpc_tls_cert.read_bytes(),
            key=settings.grpc_tls_key.read_bytes(),
            ca=ca.read_bytes() if ca is not None else None,
            server_name=settings.grpc_tls_server_name,
        )
    )


def context_of_client(certificate: Path | None) -> ssl.SSLContext:
    """Make a context for HTTPS to a server that must show `certificate`, whatever the name in it.

    Without one, servers are judged as usual.
    """
    context = ssl.create_default_context(cafile=certificate)
    if certificate is not None:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # this one, by any issuer
    return context
