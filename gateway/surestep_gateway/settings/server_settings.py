"""Settings of the server, which all its models share."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, FilePath, PositiveFloat, PositiveInt, SecretStr, model_validator
from surestep_common.access import PeerSettings
from surestep_common.config import Names, Secrets, Size, variables

from surestep_gateway.api_keys import ApiKeys, TrustedGateways, plain_keys, read_keys

_NEED_A_CERTIFICATE = ("ssl_ca_certs", "ssl_ciphers", "enable_ssl_refresh")


def _usual_host() -> str:
    """Return the address for other pods in a pod, else that for this machine alone."""
    return "0.0.0.0" if variables("KUBERNETES_SERVICE_HOST") else "127.0.0.1"  # noqa: S104


class HttpSettings(PeerSettings):
    """Settings of the HTTP server: where it listens, its certificates, and other origins."""

    host: str = Field(
        default_factory=_usual_host,
        description="address the HTTP server listens on; default: 127.0.0.1, in a pod 0.0.0.0",
    )
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
    enable_ssl_refresh: bool = Field(
        False, description="load certificate, key and authorities again when their files change"
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
        needy = {name: getattr(self, name) for name in _NEED_A_CERTIFICATE}
        if self.ssl_certfile is None and any(needy.values()):
            flags = (f"--{name.replace('_', '-')}" for name, given in needy.items() if given)
            raise ValueError(f"{next(flags)} needs --ssl-certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs")
        if self.uds is not None and self.ssl_certfile is not None:
            raise ValueError("--uds and --ssl-certfile exclude each other")
        return self


class ServerLimitSettings(PeerSettings):
    """Settings that bound what all clients of a server together may cost."""

    max_body_bytes: Size = Field(32 << 20, description="largest request body")
    max_total_body_bytes: Size | None = Field(
        None,
        description="bytes of request bodies in memory, less 64 KiB of each; default: 1 GiB, at "
        "most a quarter of the memory",
    )
    max_answer_bytes: Size = Field(256 << 20, description="largest answer that is no stream, about")
    max_connections: PositiveInt = Field(
        1 << 14, description="open connections; fewer where there are not as many descriptors"
    )
    text_processes: PositiveInt = Field(
        4,
        description="most processes that prepare large requests, unusual ones and grammars",
    )
    text_memory_bytes: Size = Field(
        2 << 30, description="memory that a text process may take over a request"
    )
    timeout_keep_alive: PositiveInt = Field(
        75,
        description="seconds an idle connection stays open; keep it above the load "
        "balancer's, often 60",
    )
    body_timeout_s: PositiveFloat = Field(
        30.0,
        description="seconds in which a request body must arrive; see --min-body-rate",
    )
    send_timeout_s: PositiveFloat = Field(
        30.0, description="seconds a client may leave what is sent to it unread"
    )
    sse_keep_alive_interval: float = Field(
        15.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds of silence after which a stream sends a ping; 0: never",
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="seconds for open requests on SIGTERM")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which new requests are still served, before "
        "--drain-timeout-s begins",
    )


class KeySettings(PeerSettings):
    """Settings of who may do what."""

    api_key: Secrets = Field(
        (), description="keys, comma separated, one of which clients must send"
    )
    api_key_file: FilePath | None = Field(
        None,
        description="file of such keys, one a line: KEY [name=NAME] [weight=NUMBER] "
        "[priority=yes|no] [adapters=NAME,NAME]",
    )
    share_prefix_cache_between_keys: bool = Field(
        default=False,
        description="let all keys share the prefix cache; each can then learn how others' "
        "prompts begin",
    )
    admin_api_key: SecretStr | None = Field(
        None, min_length=1, description="key of the /admin endpoints; there are none without it"
    )
    admin_api_key_file: FilePath | None = Field(
        None, description="file with that key, in place of --admin-api-key"
    )
    enable_sleep_mode: bool = Field(
        False,
        description="let administrators pause the engine or put it to sleep: /sleep, /wake_up, "
        "/pause, /resume",
    )
    enable_lora: bool = Field(
        False, description="requests may have adapters of low rank, as peft writes them"
    )
    enable_weight_updates: bool = Field(
        False,
        description="let administrators change weights: /update_weights_from_disk, "
        "/update_weights_from_tensor; answers name the version",
    )
    trusted_gateways: Names = Field(
        (),
        description="addresses or networks (CIDR) of gateways that may name flow and session of a "
        "request: x-llm-d-inference-fairness-id, x-gateway-inference-fairness-id, x-session-id",
    )
    protect_metrics: bool = Field(
        False, description="/metrics and /load need an API key or the admin key"
    )

    @model_validator(mode="after")
    def _keys_are_readable(self) -> Self:
        if self.admin_api_key is not None and self.admin_api_key_file is not None:
            raise ValueError("--admin-api-key and --admin-api-key-file exclude each other")
        self.gateways()
        keys = self.api_keys(), self.admin_keys()
        if self.protect_metrics and not any(keys):
            raise ValueError("--protect-metrics needs --api-key, --admin-api-key or their files")
        for name in ("enable_sleep_mode", "enable_weight_updates"):
            if getattr(self, name) and not self.admin_keys():
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --admin-api-key or --admin-api-key-file")
        return self

    def gateways(self) -> TrustedGateways:
        """Return the gateways that are believed. Raise ValueError."""
        try:
            return TrustedGateways(self.trusted_gateways)
        except ValueError as error:
            raise ValueError(f"--trusted-gateways: {error}") from None

    def api_keys(self) -> ApiKeys:
        """Return the keys of clients. Raise ValueError for a malformed file."""
        from_file = read_keys(self.api_key_file) if self.api_key_file is not None else []
        return ApiKeys(
            [*plain_keys(self.api_key), *from_file],
            share_prefixes=self.share_prefix_cache_between_keys,
        )

    def admin_keys(self) -> ApiKeys:
        """Return the keys of administrators. Raise ValueError for a file without a key."""
        if self.admin_api_key_file is not None:
            return ApiKeys(read_keys(self.admin_api_key_file))
        key = self.admin_api_key
        return ApiKeys(plain_keys([key] if key is not None else []))
