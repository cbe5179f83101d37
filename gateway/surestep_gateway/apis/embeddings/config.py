"""Settings of embeddings: from the model's folder and from the operator.

The folder of an embedding model is laid out by sentence-transformers: modules.json lists the
modules that a text passes, and the folder of the Pooling module configures the pooling. A folder
without that file holds a generative model: its embedding is the normalised hidden state of the last
token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from surestep_common.errors import InvalidRequest
from surestep_common.model_files import read_json, read_object
from surestep_proto.sampling_pb2 import LAST_TOKEN, MEAN, Pooling

from surestep_gateway.settings.api_settings import HfOverrides, PoolerConfig
from surestep_gateway.settings.config import GatewaySettings

_MODES: Mapping[str, Pooling] = {"lasttoken": LAST_TOKEN, "mean_tokens": MEAN, "mean": MEAN}
_MODE = "pooling_mode"
_TOLD = ("is_matryoshka", "matryoshka_dimensions")  # of config.json

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """The way from hidden states to embeddings."""

    pooling: Pooling
    normalize: bool
    is_matryoshka: bool  # leading parts of a vector are vectors of less precision
    dimensions: tuple[int, ...]  # of these parts; empty = any number
    default_dimensions: int | None  # None: all there are

    @classmethod
    def load(cls, folder: Path, pooler: PoolerConfig, overrides: HfOverrides) -> EmbeddingConfig:
        """Read the configuration. Raise InvalidRequest naming the file that asks for the
        unsupported.
        """
        told = _told(folder, overrides)
        modules = _modules(folder)
        pooling = {"LAST": LAST_TOKEN, "MEAN": MEAN}.get(pooler.pooling_type or "")
        if pooling is None:
            pooling = _pooling(folder, modules)
        normalize = "Normalize" in modules if modules else True
        made = cls(
            pooling=pooling,
            normalize=normalize if pooler.normalize is None else pooler.normalize,
            is_matryoshka=bool(told.is_matryoshka or told.matryoshka_dimensions),
            dimensions=tuple(told.matryoshka_dimensions or ()),
            default_dimensions=pooler.dimensions,
        )
        if pooler.dimensions is not None and not made.is_matryoshka:
            raise InvalidRequest(
                "--pooler-config: dimensions need a model that was trained for them, as far as its "
                "config.json says (is_matryoshka, matryoshka_dimensions)"
            )
        _warn_of_prompts(folder / "config_sentence_transformers.json")
        _warn_of_length(folder / "sentence_bert_config.json")
        return made

    @classmethod
    def of(cls, settings: GatewaySettings) -> EmbeddingConfig:
        """Read the configuration that a model's settings name. Raise InvalidRequest as `load`."""
        return cls.load(
            settings.model,
            PoolerConfig.model_validate(settings.pooler_config or {}),
            HfOverrides.model_validate(settings.hf_overrides or {}),
        )

    def check(self, wanted: int, hidden_size: int) -> None:
        """Raise InvalidRequest unless embeddings can have `wanted` dimensions."""
        if wanted > hidden_size:
            message = f"at most {hidden_size}, got {wanted}"
        elif not self.is_matryoshka and wanted != hidden_size:
            message = (
                f"{hidden_size}: the model was not trained for other numbers, as far as its "
                "config.json says (is_matryoshka, matryoshka_dimensions)"
            )
        elif self.dimensions and wanted not in (*self.dimensions, hidden_size):
            message = f"one of {sorted({*self.dimensions, hidden_size})}, got {wanted}"
        else:
            return
        raise InvalidRequest(f"dimensions must be {message}", param="dimensions")


def _told(folder: Path, overrides: HfOverrides) -> HfOverrides:
    """Read the Matryoshka fields of config.json; the worker reports any other problem of the
    file.
    """
    path = folder / "config.json"
    config = read_object(path) if path.exists() else {}
    config |= overrides.model_dump(exclude_none=True)
    try:
        return HfOverrides.model_validate({name: config.get(name) for name in _TOLD})
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {' or '.join(_TOLD)}: {error.errors()[0]['msg']}") from error


def _warn_of_prompts(path: Path) -> None:
    """Warn that the prompts sentence-transformers would prepend are left to the clients."""
    name = read_object(path).get("default_prompt_name") if path.exists() else None
    if name:
        logger.warning("%s: the default prompt '%s' is not put before texts", path, name)


def _warn_of_length(path: Path) -> None:
    """Warn that longer texts than sentence-transformers allows are served, not cut."""
    length = read_object(path).get("max_seq_length") if path.exists() else None
    if length:
        logger.warning("%s: max_seq_length %s is no bound here; --max-model-len is", path, length)


def _modules(folder: Path) -> dict[str, str]:
    """Return the folder of each kind of module; empty without modules.json."""
    path = folder / "modules.json"
    if not path.exists():
        return {}
    listed = read_json(path)
    if not isinstance(listed, list):
        raise InvalidRequest(f"{path}: must be a list of modules")
    modules: dict[str, str] = {}
    for module in listed:
        kind = module.get("type") if isinstance(module, dict) else None
        if not isinstance(kind, str) or not isinstance(module.get("path", ""), str):
            raise InvalidRequest(f"{path}: a module must have a type and a path")
        modules[kind.rpartition(".")[2]] = module.get("path", "")
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise InvalidRequest(
            f"{path}: modules of type {', '.join(sorted(unknown))} are not supported"
        )
    return modules


def _pooling(folder: Path, modules: Mapping[str, str]) -> Pooling:
    if "Pooling" not in modules:
        return LAST_TOKEN
    path = folder / modules["Pooling"] / "config.json"
    config = read_object(path)
    modes = [
        key.removeprefix(f"{_MODE}_")
        for key, on in config.items()
        if key != _MODE and on is True and key.startswith(_MODE)
    ]
    if isinstance(named := config.get(_MODE), str):
        modes.append(named)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise InvalidRequest(
            f"{path}: pooling by {' and '.join(sorted(modes)) or 'nothing'} is not supported, only "
            "by the last token or the mean; --pooler-config overrides it"
        )
    return _MODES[modes[0]]
