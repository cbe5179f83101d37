"""Settings: one declaration of a field gives flag, environment variable, file key, help and bounds.

A field `max_num_seqs` of a `Settings` subclass is read, in this order of priority, from the flag
`--max-num-seqs`, the variable `SURESTEP_MAX_NUM_SEQS`, the key `max_num_seqs` of the YAML file
named by `--config` or `SURESTEP_CONFIG`, and its default. Services ignore keys of the file that
are not theirs, because one file serves them all; a command that knows every key sets
`extra="forbid"`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

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
_OF_SCRIPTS = f"{ENV_PREFIX}VENV"  # read by scripts/common.sh
USAGE_ERROR = 2  # exit status

_file: ContextVar[_File | None] = ContextVar("_file", default=None)  # that was read last

S = TypeVar("S", bound=BaseSettings)
T = TypeVar("T")
_UNKNOWN = re.compile(
    r"error parsing CLI: unrecognized arguments: (?P<flag>--?[^\s=]+).*", re.DOTALL
)
_DIGITS = re.compile(r"\d+(\.\d+)?")


class _File(NamedTuple):
    """Config file, and the settings that it decided."""

    path: Path
    settings: Set[str]


class Refusal(NamedTuple):
    """Reason why a key of a config file is not served; no setting accepts it as its value."""

    reason: str


def split_names(value: Any) -> Any:
    """Split a JSON list, or names separated by commas, of which a JSON object is one; anything that
    is no text stays as it is.
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return [value]
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

    def read() -> S:
        try:
            return CliApp.run(cls, cli_args=arguments)
        except SettingsError as error:
            raise SettingsError(_with_hint(cls, arguments, str(error))) from error

    return or_exit(cls, read)


def _with_hint(cls: type[BaseSettings], arguments: Sequence[str], message: str) -> str:
    """Return what the parser says, of an unknown flag with the one that is probably meant."""
    if (unknown := _UNKNOWN.fullmatch(message)) is None:
        return message
    command = cls.model_fields.get(arguments[0].replace("-", "_"))
    of = next((one for one in get_args(command.annotation) if one), cls) if command else cls
    flags = [f"--{name.replace('_', '-')}" for name in getattr(of, "model_fields", ())]
    near = difflib.get_close_matches(unknown["flag"], flags, n=1)
    return f"unknown flag '{unknown['flag']}'{f': did you mean {near[0]}?' if near else ''}"


def or_exit(cls: type[BaseSettings], read: Callable[[], T]) -> T:
    """Return what `read` returns; wrong settings end the process, each with a line on stderr."""
    try:
        return read()
    except ValidationError as error:
        message = "\n".join(describe(cls, details) for details in error.errors())
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
        default=None, description="YAML or TOML file with any of these settings as keys"
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
        """Map the keys of a config file to the names of fields, and to Refusals."""
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
        _file.set(None)
        if (given := self.current_state.get("config")) is None:
            return {}
        path = Path(given)
        # A mapping given by flag or variable replaces the file's; it is not merged with it.
        values = cast(type[Settings], self.settings_cls).from_file(read_keys(path))
        own = {key: value for key, value in values.items() if key not in self.current_state}
        _file.set(_File(path, own.keys()))
        return own

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        raise AssertionError("the file is read as a whole")


def read_keys(path: Path) -> dict[str, Any]:
    """Return what a file of YAML, or of TOML by its name, says. Raises SettingsError."""
    import tomllib

    import yaml  # 30 ms that `surestep --help` does not need

    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path}: {error}") from error
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"config file {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"config file {path}: expected keys and values")
    return content


def describe(cls: type[BaseSettings], details: ErrorDetails) -> str:
    """Describe a validation error in one line that names the file, or flag and variable."""
    field = next((str(part) for part in reversed(details["loc"]) if isinstance(part, str)), "")
    message = " ".join(details["msg"].removeprefix("Value error, ").split())
    file, given = _file.get(), details["input"]
    where = f"config file {file.path}: " if file is not None and field in file.settings else ""
    if isinstance(given, Refusal):
        return f"{where}{given.reason}"
    if details["type"] == "extra_forbidden":
        return f"{where}unknown setting '{field}'"
    if not field:
        return message
    got = "" if field in set(secret_fields(cls)) else f", got {given!r}"
    if where:
        return f"{where}{field}: {message}{got}"
    flag = f"--{field.replace('_', '-')}"
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


def unread_variables(*classes: type[Settings]) -> list[str]:
    """Return the variables with our prefix that no setting of the classes reads."""
    read = {ENV_PREFIX + name.upper() for cls in classes for name in cls.model_fields}
    read |= {PARENT_PID, _OF_SCRIPTS}
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in read
    )


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
