"""Settings of responses, of stored ones, of chat rendering and of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from surestep_common.access import PeerSettings
from surestep_common.config import Size

from surestep_gateway.grammars.config import StructuredOutputsConfig

_UINT64 = (1 << 64) - 1


class ApiSettings(PeerSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    seed: int | None = Field(
        None,
        ge=0,
        le=_UINT64,
        description="seeds requests that bring none, the same in every run by their order; "
        "none = random",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="form of a message's parts for chat templates: string, or openai = the list; "
        "auto = the list if the template reads it",
    )
    default_chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, unless a request sets them"
    )
    reasoning_effort_map: dict[str, str] | None = Field(
        None, description="what the chat template is told for a request's reasoning_effort"
    )
    structured_outputs_config: dict[str, Any] | None = Field(
        None,
        description='JSON, what structured outputs have in common, e.g. {"disable_any_whitespace": '
        "true}",
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        False, description='leave tools out of the prompt when tool_choice is "none"'
    )
    response_role: str = Field(
        "assistant", min_length=1, description="role of the messages that chats are answered with"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="spell tokens as token_id:ID in log-probabilities"
    )
    enable_force_include_usage: bool = Field(
        False, description="end every stream with its usage, asked for or not"
    )
    enable_log_requests: bool = Field(
        False, description="log each request's parameters, and at level DEBUG its prompt"
    )
    max_log_len: int | None = Field(
        None,
        ge=0,
        description="characters of parameters, and of a prompt, that are logged; none = all",
    )
    disable_fastapi_docs: bool = Field(False, description="do not serve /openapi.json and /docs")
    ui: bool = Field(True, description="serve the status page, /ui")

    @field_validator("structured_outputs_config")
    @classmethod
    def _structured_outputs_are_as_known(
        cls, given: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        check_keys(StructuredOutputsConfig, given or {})
        return given

    def structured_outputs(self) -> StructuredOutputsConfig:
        """Return what structured outputs have in common."""
        return StructuredOutputsConfig.model_validate(self.structured_outputs_config or {})


_SCHEMES = ("redis://", "rediss://", "unix://")


def _known(given: SecretStr) -> SecretStr:
    where = given.get_secret_value()
    if where not in ("memory", "none") and not where.startswith(_SCHEMES):
        raise ValueError("must be memory, none, or a URL that begins with redis:// or rediss://")
    return given


class StoreSettings(PeerSettings):
    """Each field is a flag, a `SURESTEP_*` variable and a key of the config file."""

    responses_store: Annotated[SecretStr, AfterValidator(_known)] = Field(
        SecretStr("memory"),
        description="store of /v1/responses: memory, none, or a Redis or Valkey server, "
        "redis://HOST:PORT/DATABASE",
    )
    responses_store_ttl: PositiveFloat = Field(
        86400.0, description="seconds that a response is stored"
    )
    responses_store_bytes: Size = Field(
        256 << 20,
        description="bytes of responses in memory; beyond, the owner with most loses its oldest",
    )


class PoolerConfig(BaseModel):
    """`--pooler-config`, with vLLM's key names. None: the model's folder decides."""

    model_config = ConfigDict(extra="forbid")

    pooling_type: Literal["LAST", "MEAN"] | None = Field(
        None, validation_alias=AliasChoices("pooling_type", "seq_pooling_type")
    )
    normalize: bool | None = Field(
        None, validation_alias=AliasChoices("normalize", "use_activation")
    )
    dimensions: PositiveInt | None = None  # of vectors whose request names none


class HfOverrides(BaseModel):
    """`--hf-overrides`: values that replace those of config.json. The others are the workers'."""

    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[PositiveInt] | None = None
    # The model judges whether a document meets a query, by its logits of these tokens: no and yes,
    # or yes alone. The others say so too, in vLLM's words.
    classifier_from_token: Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    method: Literal["from_2_way_softmax", "no_post_processing"] | None = None
    is_original_qwen3_reranker: bool | None = None

    @model_validator(mode="after")
    def _one_way_to_a_score(self) -> Self:
        tokens = self.classifier_from_token or ()
        ways = {0: (None,), 1: (None, "no_post_processing"), 2: (None, "from_2_way_softmax")}
        if self.method not in ways[len(tokens)]:
            raise ValueError(f"method {self.method} makes no score of {len(tokens)} tokens")
        if self.is_original_qwen3_reranker and len(tokens) != 2:
            raise ValueError("is_original_qwen3_reranker needs the two of classifier_from_token")
        return self


def check_keys(known: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raise ValueError that names each wrong key and its problem."""
    try:
        known.model_validate(given)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, one['loc']))} is not supported"
            if one["type"] == "extra_forbidden"
            else f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors()
        ]
        raise ValueError(f"{', '.join(wrong)}; keys are {', '.join(known.model_fields)}") from None
