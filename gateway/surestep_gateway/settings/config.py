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
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode, SettingsConfigDict
from surestep_common.access import PeerSettings
from surestep_common.config import Names, split_names
from surestep_common.gguf import ModelPath
from surestep_common.model_files import name_of
from surestep_common.registry import Registry
from surestep_common.tracing import TraceSettings

from surestep_gateway.parsers import (
    HARMONY_CALLS,
    HARMONY_REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from surestep_gateway.settings import scheduler_urls
from surestep_gateway.settings.api_settings import (
    ApiSettings,
    HfOverrides,
    PoolerConfig,
    StoreSettings,
    check_keys,
)
from surestep_gateway.settings.model_list import (
    ResidencySettings,
    check_apart,
    each_model,
    first_model,
    read_entries,
)
from surestep_gateway.settings.server_settings import (
    HttpSettings,
    KeySettings,
    ServerLimitSettings,
)

SchedulerUrls = Annotated[
    tuple[Annotated[str, AfterValidator(scheduler_urls.check)], ...],
    NoDecode,
    BeforeValidator(split_names),
]


class LimitSettings(PeerSettings):
    """Settings that bound what a request may cost, and how long it may take."""

    max_logprobs: int = Field(20, ge=0, description="alternatives a request may ask for per token")
    max_n: PositiveInt = Field(128, description="sequences a request may ask for per prompt")
    max_concurrent_requests: PositiveInt = Field(
        1024, description="generation requests open at once; more are answered with 429"
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


def _choices(registry: Registry[Any]) -> str:
    return ", ".join(registry.names())


def _known(registry: Registry[Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in registry.names():
            raise ValueError(f"must be one of {_choices(registry)}")
        return name

    return check


class GatewaySettings(
    HttpSettings,
    ServerLimitSettings,
    KeySettings,
    LimitSettings,
    ResidencySettings,
    ApiSettings,
    StoreSettings,
    TraceSettings,
):
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
        description="host:port of the scheduler; comma separated or repeated: of its replicas, or "
        "where to find them: dns://NAME:PORT, dns+srv://NAME, file:///PATH, k8s://NAMESPACE/SERVICE",
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
        None,
        description="format the model calls tools in, if not as the chat template shows it: "
        f"{_choices(TOOL_PARSERS)}",
    )
    enable_auto_tool_choice: bool = Field(
        False,
        description="let the model call the tools of a chat; on where no --tool-call-parser is "
        "given and the chat template shows one",
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

    @model_validator(mode="before")
    @classmethod
    def _list_has_the_model(cls, given: Any) -> Any:
        """Take the first model of a list where none is named apart."""
        if isinstance(given, dict) and given.get("models") and not given.get("model"):
            given["model"] = first_model(read_entries(given["models"]))
        return given

    @model_validator(mode="after")
    def _harmony_is_one_format(self) -> Self:
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

    def adapter_named(self, model: str | None) -> str:
        """Return the adapter that a request's model names; empty: it is the model itself."""
        return "" if model is None or model in self.model_names else model

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; responses carry the first."""
        return self.served_model_name or (name_of(self.model.resolve()),)

    @cached_property
    def each(self) -> tuple[GatewaySettings, ...]:
        """The settings of each model. Raises SettingsError where two are not to be told apart."""
        each = each_model(self)
        check_apart("name", (name for one in each for name in one.model_names))
        check_apart("scheduler_url", (url for one in each for url in one.scheduler_url))
        return each
