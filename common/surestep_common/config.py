"""Settings: one declaration of a field gives flag, environment variable, file key, help and bounds.

A field `max_num_seqs` of a `Settings` subclass is read, in this order of priority, from the flag
`--max-num-seqs`, the variable `SURESTEP_MAX_NUM_SEQS`, the key `max_num_seqs` of the YAML file
named by `--config` or `SURESTEP_CONFIG`, and its default. Services ignore keys of the file that
are not theirs, because one file serves them all; a command that knows every key sets
`extra="forbid"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast, get_args

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

ENV_PREFIX = "SURESTEP_"
NOTIFY_SOCKET = "NOTIFY_SOCKET"
# What makes cuBLAS do without a workspace, in which it adds up sums that it has split.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
PARENT_PID = f"{ENV_PREFIX}PARENT_PID"
USAGE_ERROR = 2  # exit status

S = TypeVar("S", bound=BaseSettings)
T = TypeVar("T")
_DIGITS = re.compile(r"\d+(\.\d+)?")


def split_names(value: Any) -> Any:
    """Split a JSON list, or names separated by commas; anything that is no text stays as it is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


_SUFFIXES = {letter: 10 ** (3 * n) for n, letter in enumerate("kmgt", 1)}
_SUFFIXES |= {letter: 1 << (10 * n) for n, letter in enumerate("KMGT", 1)}


def human_int(text: str) -> int:
    """Read a whole number as people write it: 32768, 32k (thousands), 32K (of 1024), 25.6k.

    Raises ValueError.
    """
    number, factor = text.strip(), _SUFFIXES.get(text.strip()[-1:])
    if factor is None:
        with contextlib.suppress(ValueError):
            return int(number)
    elif _DIGITS.fullmatch(number[:-1]):
        product = Decimal(number[:-1]) * factor
        if product == int(product):
            return int(product)
    raise ValueError(f"{text!r} is no whole number")


def _count(value: Any) -> Any:
    return human_int(value) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_count)]  # of tokens, say
Size = Annotated[Count, Field(gt=0)]  # bytes
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_names)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_names)]


def _level(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_level)
]


def load(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """`Settings.load` for any settings class, such as one that only lists subcommands."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return or_exit(cls, lambda: CliApp.run(cls, cli_args=arguments))


def or_exit(cls: type[BaseSettings], read: Callable[[], T]) -> T:
    """Return what `read` returns; wrong settings end the process, each with a line on stderr."""
    try:
        return read()
    except ValidationError as error:
        message = "\n".join(_describe(cls, details) for details in error.errors())
    except SettingsError as error:
        message = str(error)
    program = cls.model_config.get("cli_prog_name") or Path(sys.argv[0]).name
    sys.stderr.writelines(f"{program}: {line}\n" for line in message.splitlines())
    raise SystemExit(USAGE_ERROR)


class Settings(BaseSettings):
    """Base of every service's settings. Frozen; fields with `Field(description=...)` are flags."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags="dual",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_show_env_vars=True,
        hide_input_in_errors=True,  # it may be a secret, or all settings
    )

    config: Path | None = Field(
        default=None, description="YAML file with any of these settings as keys"
    )
    log_level: LogLevel = Field(default="INFO", description="least severe messages that are logged")
    log_json: bool = Field(default=False, description="log one JSON object per line")

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Read all sources; `argv` (default: the process's arguments) holds the flags.

        A wrong value ends the process with status 2 and one line on stderr.
        """
        return load(cls, argv)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Pydantic's hook; classes with other sources override `sources`."""
        return cls.sources(init_settings, env_settings)

    @classmethod
    def sources(
        cls, init: PydanticBaseSettingsSource, env: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """From the first in priority to the last; flags arrive through `init` or before it."""
        return init, env, _ConfigFile(cls)

    @classmethod
    def from_file(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Map the keys of a config file to the names of fields. Raises SettingsError."""
        return {str(key).replace("-", "_"): value for key, value in content.items()}

    def environ(self) -> dict[str, str]:
        """Return values that were set explicitly, as environment variables for a child process.

        `config` is left out: what the file said is among the values.
        """
        values = ((name, getattr(self, name)) for name in sorted(self.model_fields_set))
        return {
            ENV_PREFIX + name.upper(): _as_text(value)
            for name, value in values
            if value is not None and name != "config"
        }


class _ConfigFile(PydanticBaseSettingsSource):
    """The YAML file that a source of higher priority names."""

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        # A mapping given by flag or variable replaces the file's; it is not merged with it.
        values = cast(type[Settings], self.settings_cls).from_file(_read_yaml(Path(path)))
        return {key: value for key, value in values.items() if key not in self.current_state}

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("the file is read as a whole")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # 30 ms that `surestep --help` does not need

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"config file {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"config file {path}: expected keys and values")
    return content


def _describe(cls: type[BaseSettings], details: ErrorDetails) -> str:
    """Describe a validation error in one line that names flag and variable."""
    field = next((str(part) for part in reversed(details["loc"]) if isinstance(part, str)), "")
    message = " ".join(details["msg"].removeprefix("Value error, ").split())
    if details["type"] == "extra_forbidden":
        return f"unknown setting '{field}'"
    if not field:
        return message
    flag = f"--{field.replace('_', '-')}"
    got = "" if field in set(secret_fields(cls)) else f", got {details['input']!r}"
    return f"{field}: {message}{got} ({flag} or {ENV_PREFIX}{field.upper()})"


def secret_fields(annotation: Any) -> Iterator[str]:
    """Yield the fields of settings, those of subcommands included, whose type is secret."""
    for name, field in getattr(annotation, "model_fields", {}).items():
        if _is_secret(field.annotation):
            yield name
        yield from secret_fields(field.annotation)
    for argument in get_args(annotation):
        yield from secret_fields(argument)


def _is_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(map(_is_secret, get_args(annotation)))


def _as_text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case SecretStr():
            return value.get_secret_value()
        case dict() | list() | tuple():
            return json.dumps(value, default=_as_text)
        case _:
            return str(value)


def child_environ(values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with `values` as its only settings.

    Signs of life are wanted from this process, not from its children.
    """
    own = (ENV_PREFIX, NOTIFY_SOCKET)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    return {**inherited, **values}


def hide_progress_bars() -> None:
    """Hide those of libraries that this process and its children yet import: a bar that is no
    terminal's fills a log with thousands of characters."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def variables(prefix: str) -> dict[str, str]:
    """Return what the environment has under names that begin so."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def notify_address() -> str | None:
    """Return the socket for signs of life (see notify.py); None where none are wanted."""
    return os.environ.get(NOTIFY_SOCKET)


def without_cublas_workspace() -> dict[str, str]:
    """Return variables for a process whose cuBLAS is to have no workspace; set ones stay."""
    return {name: os.environ.get(name, value) for name, value in _NO_WORKSPACE.items()}


def gpus_are_hidden() -> bool:
    """Return whether the environment keeps CUDA from seeing any GPU."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown is not None and shown.partition(",")[0].strip() in ("", "-1")


def traces_protocol() -> str:
    """Return the protocol for sending spans, in the words of OpenTelemetry."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next(filter(None, map(os.environ.get, names)), "grpc")


def parent_pid() -> int | None:
    """Return the process that this one must not outlive; None where there is none."""
    value = os.environ.get(PARENT_PID)
    return int(value) if value is not None else None


def cache_dir() -> Path:
    """Return the folder of what can be fetched again."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Return the folder of logs."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def runtime_dir() -> str | None:
    """Return the folder for sockets of this user's session, if there is one."""
    return os.environ.get("XDG_RUNTIME_DIR")


def _xdg(variable: str, fallback: str) -> Path:
    home = os.environ.get(variable)
    return (Path(home) if home else Path.home() / fallback) / "surestep"
