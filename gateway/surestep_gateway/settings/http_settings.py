"""Settings of the HTTP server: where it listens, its certificates, and pages of other origins."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, FilePath, model_validator
from surestep_common.access import PeerSettings
from surestep_common.config import Names


class HttpSettings(PeerSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    host: str = Field("127.0.0.1", description="address the HTTP server listens on")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0 = any free one")
    uds: Path | None = Field(
        None, description="Unix socket the HTTP server listens on, in place of host and port"
    )
    root_path: str = Field(
        "", pattern="^(/.*[^/])?$", description="path under which a proxy serves the API, e.g. /llm"
    )
    ssl_certfile: FilePath | None = Field(
        None, description="PEM file: certificate of the HTTP server, which then speaks HTTPS only"
    )
    ssl_keyfile: FilePath | None = Field(
        None, description="PEM file: private key of that certificate"
    )
    ssl_ca_certs: FilePath | None = Field(
        None, description="PEM file: authorities whose certificates clients may show"
    )
    ssl_cert_reqs: int = Field(
        0,
        ge=0,
        le=2,
        description="certificates of clients: 0 = not asked for, 1 = optional, 2 = needed, except "
        "for health checks",
    )
    ssl_ciphers: str | None = Field(None, description="ciphers of TLS 1.2, as OpenSSL names them")
    allowed_origins: Names = Field(
        (), description="origins whose pages may use the API in a browser (CORS); * = all"
    )
    allowed_methods: Names = Field(("*",), description="methods that they may use")
    allowed_headers: Names = Field(("*",), description="headers that they may send")
    allow_credentials: bool = Field(
        False, description="let their browsers send cookies and client certificates"
    )

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_ciphers):
            raise ValueError("--ssl-ca-certs and --ssl-ciphers need --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs")
        if self.uds is not None and self.ssl_certfile is not None:
            raise ValueError("--uds and --ssl-certfile exclude each other")
        return self
