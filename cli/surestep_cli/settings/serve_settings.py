"""Settings of `surestep serve`: those of all services, and the launcher's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, model_validator
from pydantic_settings import (
    CliPositionalArg,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from surestep_common.config import ENV_PREFIX, Refusal, or_exit, unread_variables, variables
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.model_list import each_model
from surestep_scheduler.config import SchedulerSettings
from surestep_worker.config import WorkerSettings

from surestep_cli.api.http import ServerUrl

from .flags import FlagReader, nearest
from .vllm_flags import vllm_flags

_TOKEN = f"{ENV_PREFIX}HF_TOKEN"
_VLLM_PREFIX = "VLLM_"
_NO_VARIABLE = "not read; docs/use/vllm.md names the variables that are"

_EMBEDDING_TASKS = ("embed", "embedding")  # of --task, which vLLM had before it had --runner


def _runner(value: Any) -> Any:
    if value in _EMBEDDING_TASKS:
        return "pooling"
    if value not in ("auto", "generate", "pooling"):
        raise ValueError(
            "must be auto, generate or pooling: scores, classes, rewards and transcripts are not "
            "made here"
        )
    return value


# What the settings that are being read have asked for in vain.
_in_vain: ContextVar[dict[str, str]] = ContextVar("_in_vain")


class ServeSettings(WorkerSettings, GatewaySettings, SchedulerSettings):  # type: ignore[misc]
    """Every setting of the system; the one place that knows all keys of the config file.

    Where services share a field, the first base describes it (hence the remark for mypy: the
    scheduler may be given no `max_num_seqs`).
    """

    model_config = SettingsConfigDict(extra="forbid", cli_prog_name="surestep serve")

    model: CliPositionalArg[str | None] = Field(  # type: ignore[assignment]  # services: a folder
        None,
        description="folder, GGUF file or hub id, owner/name:Q4_K_M for a GGUF file of the hub; "
        "none = the default model",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of the model on the hub"
    )
    tokenizer: str | None = Field(  # type: ignore[assignment]  # services: a folder
        default=None, description="folder or hub id of another tokenizer and its chat template"
    )
    tokenizer_revision: str | None = Field(
        default=None, description="branch, tag or commit of that tokenizer on the hub"
    )
    download_dir: Path | None = Field(
        default=None, description="folder for what is fetched from the hub; none = the hub's own"
    )
    hf_token: SecretStr | None = Field(
        default=None, description="token for the hub; none = the one that is stored here"
    )
    runner: Annotated[Literal["auto", "generate", "pooling"], BeforeValidator(_runner)] = Field(
        default="auto",
        description="what the model must do: generate = write text, pooling = make embeddings",
    )
    log_dir: Path | None = Field(
        default=None,
        description="folder for the services' logs; none = a new one in the state folder",
    )
    startup_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds until the model must be ready"
    )

    _without_effect: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Load the settings; accept flags in all forms that vLLM accepts, and its keys in the
        file.
        """
        arguments = sys.argv[1:] if argv is None else argv
        return or_exit(cls, lambda: cls.of_flags(arguments))

    @classmethod
    def of_flags(cls, arguments: Sequence[str]) -> Self:
        """Read all sources. Raise SettingsError or ValidationError."""
        asked = FlagReader(cls.model_fields)
        asked.read_arguments(arguments)
        if asked.more_models:
            first = asked.values.pop("model")
            asked.values["models"] = [{"model": word} for word in (first, *asked.more_models)]
        asked.check()
        _in_vain.set(asked.without_effect)
        settings = cls(**asked.values)
        settings._without_effect = asked.without_effect
        if settings.model is None and asked.swallowed is not None:
            raise SettingsError(
                f"{asked.swallowed} takes every value up to the next flag: "
                "give the model first, `surestep serve MODEL ...`"
            )
        if settings.models and "model" in asked.values:
            raise SettingsError(f"{asked.values['model']}: it stands in --models, or there is none")
        each_model(settings)  # which raises
        return settings

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        asked = FlagReader(cls.model_fields)
        asked.read_keys(content)
        _in_vain.get({}).update(asked.without_effect)
        # No setting has a number as its name, so each of these is reported, beside wrong values.
        refused = {str(n): Refusal(problem) for n, problem in enumerate(asked.problems)}
        return asked.values | refused

    @classmethod
    def sources(
        cls, init: PydanticBaseSettingsSource, env: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources; the last are the variables of vLLM that are read."""
        return (*super().sources(init, env), _VllmVariables(cls))

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Flags, keys and variables that were accepted without effect, and the reasons."""
        return self._without_effect

    @classmethod
    def mistyped_variables(cls) -> list[str]:
        """Return the variables with our prefix that nothing reads, each with what may be meant."""
        names = [name.upper() for name in cls.model_fields]
        near = (
            (name, nearest(name.upper().removeprefix(ENV_PREFIX), names))
            for name in unread_variables(cls, ServerUrl)
        )
        return [
            f"{name} (did you mean {ENV_PREFIX}{known}?)" if known else name for name, known in near
        ]

    def environ(self) -> dict[str, str]:
        """Return the variables for the services, which download nothing from the hub."""
        return {name: value for name, value in super().environ().items() if name != _TOKEN}

    @model_validator(mode="after")
    def _someone_to_talk_to(self) -> ServeSettings:
        """Skip the scheduler's own check; the launcher sets its addresses."""
        return self

    @model_validator(mode="after")
    def _guests_need_a_door(self) -> ServeSettings:
        """Skip the check for a secret; the launcher creates one where none is given."""
        return self


class _VllmVariables(PydanticBaseSettingsSource):
    """The variables of vLLM; a few stand for a flag that is not given otherwise."""

    def __call__(self) -> dict[str, Any]:
        known = {}
        for name, value in variables(_VLLM_PREFIX).items():
            flag = vllm_flags().environment.get(name)
            if flag is None:
                _in_vain.get({})[name] = _NO_VARIABLE
            elif value and not flag.is_neutral(value):
                field = flag.name.replace("-", "_")
                if field not in self.current_state:
                    known[field] = value
        return known

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("the variables are read as a whole")
