"""Settings of the API's responses and chat rendering, where a request leaves them open."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator
from surestep_common.access import PeerSettings

from surestep_gateway.grammars.config import StructuredOutputsConfig

from .embeddings import check_keys

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
