"""Settings of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode, SettingsConfigDict
from surestep_common import addresses
from surestep_common.access import PeerSettings
from surestep_common.config import Names, Secrets, Size, split_names
from surestep_common.gguf import ModelPath
from surestep_common.model_files import name_of
from surestep_common.registry import Registry
from surestep_common.tracing import TraceSettings

from surestep_gateway.auth.api_keys import ApiKeys, plain_keys, read_keys
from surestep_gateway.parsers import (
    HARMONY_CALLS,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from surestep_gateway.settings.api_settings import (
    ApiSettings,
    HfOverrides,
    PoolerConfig,
    StoreSettings,
    check_keys,
)

SchedulerUrls = Annotated[
    tuple[Annotated[str, AfterValidator(addresses.check)], ...],
    NoDecode,
    BeforeValidator(split_names),
]


class HttpSettings(PeerSettings):
    """Settings of the HTTP server: where it listens, its certificates, and other origins."""

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


class LimitSettings(PeerSettings):
    """Settings that bound what a client may cost, and how long anything may take."""

    max_logprobs: int = Field(20, ge=0, description="alternatives a request may ask for per token")
    max_n: PositiveInt = Field(128, description="sequences a request may ask for per prompt")
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
    max_concurrent_requests: PositiveInt = Field(
        1024, description="generation requests open at once; more are answered with 429"
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
    request_timeout_s: PositiveFloat = Field(
        600.0, description="seconds a request may take as a whole"
    )
    first_token_timeout_s: PositiveFloat = Field(
        300.0, description="seconds until the first token of a sequence"
    )
    inter_token_timeout_s: PositiveFloat = Field(
        60.0, description="seconds between two tokens of a sequence"
    )
    resume_timeout_s: PositiveFloat = Field(
        60.0, description="seconds to wait for a lost scheduler before open requests fail"
    )
    admission_timeout_s: float = Field(
        30.0,
        ge=0,
        description="seconds a new request waits for a scheduler; they begin anew when a "
        "drain has ended",
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="seconds for open requests on SIGTERM")
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which new requests are still served, before "
        "--drain-timeout-s begins",
    )


def _choices(registry: Registry[Any]) -> str:
    return ", ".join(registry.names())


def _known(registry: Registry[Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in registry.names():
            raise ValueError(f"must be one of {_choices(registry)}")
        return name

    return check


class GatewaySettings(HttpSettings, LimitSettings, ApiSettings, StoreSettings, TraceSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    model_config = SettingsConfigDict(cli_prog_name="surestep-gateway")

    model: ModelPath = Field(
        description="folder with tokenizer.json and the chat template, or a GGUF file"
    )
    tokenizer: Path | None = Field(
        None, description="folder of another tokenizer and its chat template"
    )
    served_model_name: Names = Field(
        (),
        description="names clients may use, comma separated; default: the folder's name, or "
        "its hub id",
    )
    scheduler_url: SchedulerUrls = Field(
        ("127.0.0.1:50051",),
        min_length=1,
        description="host:port of the scheduler; comma separated or repeated: of its replicas",
    )
    api_key: Secrets = Field(
        (), description="keys, comma separated, one of which clients must send"
    )
    api_key_file: FilePath | None = Field(
        None,
        description="file of such keys, one a line: KEY [name=NAME] [weight=NUMBER] "
        "[priority=yes|no]",
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
    protect_metrics: bool = Field(
        False, description="/metrics and /load need an API key or the admin key"
    )
    chat_template: str | None = Field(
        None, description="file with a template, or a template, that replaces the checkpoint's"
    )
    trust_request_chat_template: bool = Field(
        False, description="accept a `chat_template` field in requests"
    )
    chat_template_timeout_s: PositiveFloat = Field(
        10.0, description="seconds for a template over a large chat, or a request's own"
    )
    reasoning_parser: Annotated[str, AfterValidator(_known(REASONING_PARSERS))] | None = Field(
        None, description=f"sets reasoning apart in chats: {_choices(REASONING_PARSERS)}"
    )
    tool_call_parser: Annotated[str, AfterValidator(_known(TOOL_PARSERS))] | None = Field(
        None, description=f"format the model calls tools in: {_choices(TOOL_PARSERS)}"
    )
    enable_auto_tool_choice: bool = Field(
        False, description="let the model call the tools of a chat; needs --tool-call-parser"
    )
    allow_special_tokens_in_content: bool = Field(
        False, description="read special tokens as such also in messages of users and tools"
    )
    pooler_config: dict[str, Any] | None = Field(
        None,
        description='JSON for embeddings, e.g. {"pooling_type":"MEAN","normalize":true}; default: '
        "the model's modules.json, or the last token's, normalised",
    )
    hf_overrides: dict[str, Any] | None = Field(
        None,
        description="JSON, what config.json should say instead; of embeddings: is_matryoshka, "
        "matryoshka_dimensions; of a model that judges: classifier_from_token; and "
        "whatever the workers are given",
    )

    @model_validator(mode="after")
    def _keys_are_readable(self) -> Self:
        if self.admin_api_key is not None and self.admin_api_key_file is not None:
            raise ValueError("--admin-api-key and --admin-api-key-file exclude each other")
        keys = self.api_keys(), self.admin_keys()
        if self.protect_metrics and not any(keys):
            raise ValueError("--protect-metrics needs --api-key, --admin-api-key or their files")
        for name in ("enable_sleep_mode", "enable_weight_updates"):
            if getattr(self, name) and not self.admin_keys():
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --admin-api-key or --admin-api-key-file")
        return self

    @model_validator(mode="after")
    def _calls_need_a_parser(self) -> Self:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        given = self.reasoning_parser, self.tool_call_parser
        harmony = self.reasoning_parser == HARMONY_REASONING, self.tool_call_parser == HARMONY_CALLS
        if None not in given and any(harmony) and not all(harmony):
            raise ValueError(
                f"--reasoning-parser {HARMONY_REASONING} and --tool-call-parser {HARMONY_CALLS} "
                "read one format: neither goes with another parser"
            )
        return self

    @field_validator("pooler_config", "hf_overrides")
    @classmethod
    def _embeddings_are_as_known(
        cls, given: dict[str, Any] | None, info: ValidationInfo
    ) -> dict[str, Any] | None:
        known = PoolerConfig if info.field_name == "pooler_config" else HfOverrides
        check_keys(known, given or {})
        return given

    @cached_property
    def judging_tokens(self) -> tuple[str, ...]:
        """The tokens that say no and yes where the model judges, or yes alone."""
        return tuple(
            HfOverrides.model_validate(self.hf_overrides or {}).classifier_from_token or ()
        )

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

    def adapter_named(self, model: str | None) -> str:
        """Return the adapter that a request's model names; empty: it is the model itself."""
        return "" if model is None or model in self.model_names else model

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; responses carry the first."""
        return self.served_model_name or (name_of(self.model.resolve()),)
