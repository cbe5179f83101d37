"""Downloads and preparations of `surestep serve` before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from surestep_common.errors import InvalidRequest, SurestepError, Unavailable
from surestep_common.gguf import weights_of
from surestep_common.model_files import object_or_empty
from surestep_worker.config import why_no_cuda
from surestep_worker.configs.wanted_quantization import check_held, rounding_wanted
from surestep_worker.drafters.config import SpeculativeConfig
from surestep_worker.drafters.registry import HEADS_APART
from surestep_worker.heads import head_folder

from surestep_cli.settings.serve_settings import ServeSettings

from .hub import ModelSource
from .model_source import (
    ModelFolder,
    held_quantization,
    resolve,
    resolve_tokenizer,
)
from .speculators import verifier_of

_HEADS = "num_attention_heads"
_MOST_RANKS = 64


class Fetched(NamedTuple):
    """Files to serve, all of them on this machine, except for a draft model that cannot be had."""

    settings: ServeSettings
    model: ModelFolder
    tokenizer: Path | None  # if it is not the model's


def fetch(settings: ServeSettings, console: Console) -> Fetched:
    """Fetch model, tokenizer and draft model. Raise SurestepError."""
    source = _source(settings)
    model = resolve(settings.model, console, source)
    if not model.of_hub:
        _tell_idle("--revision", settings.revision, model.path, console)
    if settings.model is not None and (verifier := verifier_of(model.path)) is not None:
        settings, model = _with_verifier(settings, model, verifier, console)
    rounding_wanted(settings.quantization, held_quantization(model.path), settings.device)
    _check_ranks(settings, model.path)
    tokenizer = _tokenizer(settings, model, console)
    return Fetched(with_drafter(settings, console), model, tokenizer)


def _check_ranks(settings: ServeSettings, folder: Path) -> None:
    """Raise InvalidRequest for more ranks than share the model's heads, and for a device that is
    not there. The ranks check everything else, which takes torch."""
    if settings.device == "cuda" and (why := why_no_cuda()) is not None:
        raise InvalidRequest(f"--device cuda: {why}", param="device")
    config = object_or_empty(folder / "config.json")
    inner = config.get("text_config")
    given = (settings.hf_overrides, inner if isinstance(inner, dict) else None, config)
    heads = next((one[_HEADS] for one in given if one is not None and _HEADS in one), None)
    ranks = settings.tensor_parallel_size
    if isinstance(heads, int) and heads > 0 and heads % ranks:
        fit = ", ".join(str(n) for n in range(1, _MOST_RANKS + 1) if heads % n == 0)
        raise InvalidRequest(
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} heads: {fit} do",
            param="tensor_parallel_size",
        )


def _with_verifier(
    settings: ServeSettings, draft: ModelFolder, verifier: str, console: Console
) -> tuple[ServeSettings, ModelFolder]:
    """Return the model that a draft model was made for, to be served with it under both names.

    What --speculative-config says counts before what the draft model does. Raise Unavailable.
    """
    try:
        model = resolve(verifier, console, _source(settings)._replace(revision=None))
    except SurestepError as error:
        message = f"{draft.name} is a draft model for {verifier}: {error.message}"
        raise Unavailable(message) from error
    line = f"{draft.name} is a draft model: serving {model.name}, for which it was made"
    console.print(line, markup=False, soft_wrap=True)
    changes = {
        "model": verifier,
        "served_model_name": settings.served_model_name or (draft.name, model.name),
        "speculative_config": {"model": str(draft.path)} | (settings.speculative_config or {}),
    }
    return settings.model_copy(update=changes), model


def _tokenizer(settings: ServeSettings, model: ModelFolder, console: Console) -> Path | None:
    """Return the folder of the tokenizer if that is another than the model's."""
    name = settings.tokenizer
    if name is None and settings.tokenizer_revision is not None:
        if model.of_hub and weights_of(model.path) is None:  # no GGUF file
            name = model.name
        else:
            _tell_idle("--tokenizer-revision", settings.tokenizer_revision, model.path, console)
    if name is None:
        return None
    source = _source(settings)._replace(revision=settings.tokenizer_revision)
    return resolve_tokenizer(name, console, source)


def with_drafter(settings: ServeSettings, console: Console) -> ServeSettings:
    """Return the settings with the folder of their draft model, which may be one of the hub.

    One that is to be found is looked for where others are downloaded to. A folder that is not there
    is left to the worker, which serves without it unless it is required. Raise InvalidRequest for
    settings of speculation that are wrong.
    """
    if settings.drafters is None:
        settings = settings.model_copy(update={"drafters": settings.download_dir})
    asked = settings.speculative_config or {}
    config = {key: value for key, value in asked.items() if value is not None}
    if not config:
        return settings
    # vLLM's keys for what is fetched; the worker is given a folder.
    revision, quantization = config.pop("revision", None), config.pop("quantization", None)
    name = config.get("model")
    elsewhere = isinstance(name, str) and head_folder(name) == Path(name)
    if elsewhere and config.get("method") in {None, *HEADS_APART}:
        source = _source(settings)._replace(revision=revision)
        try:
            config["model"] = str(resolve(name, console, source).path)
        except SurestepError as error:
            if "method" not in config:
                raise Unavailable(
                    f"--speculative-config has no method, and its model says none: {error}"
                ) from error
            console.print(f"Warning: draft model: {error}", markup=False, soft_wrap=True)
        else:
            if quantization is not None:
                check_held(quantization, held_quantization(Path(config["model"])))
    SpeculativeConfig.from_json(json.dumps(config))
    return settings.model_copy(update={"speculative_config": config})


def _source(settings: ServeSettings) -> ModelSource:
    token = settings.hf_token.get_secret_value() if settings.hf_token is not None else None
    return ModelSource(settings.revision, settings.download_dir, token)


def _tell_idle(flag: str, value: str | None, folder: Path, console: Console) -> None:
    if value is not None:
        line = f"Warning: {flag} does nothing: {folder} is no model of the hub"
        console.print(line, markup=False, soft_wrap=True)
