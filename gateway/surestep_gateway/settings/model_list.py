"""The models behind one URL: a list of what each has for itself, over what is said for all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_settings import NoDecode, SettingsError
from surestep_common.access import PeerSettings
from surestep_common.config import describe, read_keys
from surestep_common.tracing import TraceSettings

from .api_settings import StoreSettings
from .server_settings import HttpSettings, KeySettings, ServerLimitSettings

_NAME = "name"  # of an entry: short for served_model_name
_OF_ALL = (HttpSettings, ServerLimitSettings, KeySettings, StoreSettings, TraceSettings)
_OF_THE_LAUNCHER = "log_dir", "startup_timeout_s"
_OF_ALL_MODELS = "models", "max_loaded_models", "ui", "disable_fastapi_docs", "seed"
# What models of a server have in common, and no entry of a list has.
OF_THE_SERVER = frozenset(name for one in _OF_ALL for name in one.model_fields).union(
    _OF_THE_LAUNCHER, _OF_ALL_MODELS
)
_OF_ONE_MODEL = ("model", "served_model_name", "revision", "tokenizer", "tokenizer_revision")
_ADDRESSES = ("scheduler_url", "scheduler_listen", "supervisor_listen", "worker_listen")

S = TypeVar("S", bound="ResidencySettings")


def read_entries(value: Any) -> Any:
    """Return the entries of a file, of several, of a list in JSON, or of one. Raise ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    parts = [value] if isinstance(value, str | Path) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("must be a file, or a list of models")
    entries = [
        entry
        for part in parts
        for entry in ([part] if isinstance(part, dict) else _of_file(Path(str(part))))
    ]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("each model has keys of its own: name, model and so on")
    return tuple(entries)


def _of_file(path: Path) -> list[Any]:
    found = read_keys(path).get("models")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path} has no list `models`")
    return found


ModelList = Annotated[tuple[dict[str, Any], ...], NoDecode, BeforeValidator(read_entries)]


class ResidencySettings(PeerSettings):
    """Settings that say which models there are, and when each is in memory."""

    models: ModelList = Field(
        (),
        description="YAML or TOML file: a list `models`, each with name, model and flags",
    )
    load_on_demand: bool = Field(False, description="load the model at its first request")
    unload_idle_s: PositiveFloat | None = Field(
        None, description="idle seconds after which the model sleeps; none = never"
    )
    unload_level: int = Field(
        1, ge=1, le=2, description="of that sleep: 1 = weights stay in memory, 2 = nothing"
    )
    max_loaded_models: PositiveInt | None = Field(
        None,
        description="models awake at once; none = as many as fit",
    )

    @property
    def comes_and_goes(self) -> bool:
        """Return whether requests wake the model, and time or others put it to sleep."""
        return self.load_on_demand or self.unload_idle_s is not None


def each_model(settings: S) -> tuple[S, ...]:
    """Return the settings of every model; without a list, these alone.

    Raise SettingsError for entries that are wrong, or of one name.
    """
    if not settings.models:
        return (settings,)
    given = settings.model_fields_set - {"models", "config"}
    mine = [name for name in (*_OF_ONE_MODEL, *_ADDRESSES) if name in given and name != "model"]
    if mine:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in mine)
        raise SettingsError(f"{flags}: one model's own; with several it stands in --models")
    common = {name: getattr(settings, name) for name in given - {"model"}}
    each, problems = [], []
    for number, entry in enumerate(settings.models, 1):
        try:
            each.append(_own(settings, common, number, entry))
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    return tuple(each)


def first_model(entries: Sequence[Mapping[str, Any]]) -> Any:
    """Return the folder of the first entry; None where it has none."""
    return entries[0].get("model") if entries else None


def check_apart(what: str, values: Iterable[str]) -> None:
    """Raise SettingsError where two models have the same."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise SettingsError(f"models: two have the {what} '{twice[0]}'")


def _own(settings: S, common: Mapping[str, Any], number: int, entry: Mapping[str, Any]) -> S:
    """Return the settings of one entry. Raise SettingsError."""
    at = f"models: {entry.get(_NAME) or entry.get('model') or f'entry {number}'}"
    own = {("served_model_name" if key == _NAME else key): v for key, v in entry.items()}
    if "model" not in own:
        raise SettingsError(f"{at}: model: the folder, file or hub id is missing")
    cls = type(settings)
    try:
        values = cls.from_file(own)
        if shared := sorted(OF_THE_SERVER & values.keys()):
            raise SettingsError(f"{at}: {', '.join(shared)}: the same for all, so not in an entry")
        return cls(**{**common, **values, "models": ()})
    except ValidationError as error:
        lines = (f"{at}: {describe(cls, one)}" for one in error.errors())
        raise SettingsError("\n".join(lines)) from None
