"""What `surestep serve` downloads and prepares before anything starts."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from surestep_common.errors import SurestepError

from surestep_cli.settings.serve_settings import ServeSettings

from .model_source import ModelFolder, ModelSource, check_quantization, resolve, resolve_tokenizer


def fetch(settings: ServeSettings, console: Console) -> tuple[ModelFolder, Path | None]:
    """Return the model, and the folder of its tokenizer if that is another. Raise SurestepError."""
    source = _source(settings)
    model = resolve(settings.model, console, source)
    if settings.quantization is not None:
        check_quantization(model.path, settings.quantization)
    if model.name != settings.model:
        _tell_idle("--revision", settings.revision, model.path, console)
    name = settings.tokenizer
    if name is None and settings.tokenizer_revision is not None:
        if model.name == settings.model:  # of the hub, where its tokenizer is another one's
            name = settings.model
        else:
            _tell_idle("--tokenizer-revision", settings.tokenizer_revision, model.path, console)
    if name is None:
        return model, None
    source = source._replace(revision=settings.tokenizer_revision)
    return model, resolve_tokenizer(name, console, source)


def with_draft_folder(settings: ServeSettings, console: Console) -> ServeSettings:
    """Return the settings with the folder of their draft model, which may be one of the hub.

    One that is not there is left to the worker, which serves without it unless it is required.
    """
    config = settings.speculative_config or {}
    name, method = config.get("model"), config.get("method", "eagle3")
    if not isinstance(name, str) or method != "eagle3":
        return settings
    try:
        folder = resolve(name, console, _source(settings)._replace(revision=None)).path
    except SurestepError as error:
        console.print(f"Warning: draft model: {error}", markup=False, soft_wrap=True)
        return settings
    return settings.model_copy(update={"speculative_config": {**config, "model": str(folder)}})


def _source(settings: ServeSettings) -> ModelSource:
    token = settings.hf_token.get_secret_value() if settings.hf_token is not None else None
    return ModelSource(settings.revision, settings.download_dir, token)


def _tell_idle(flag: str, value: str | None, folder: Path, console: Console) -> None:
    if value is not None:
        line = f"Warning: {flag} does nothing: {folder} is no model of the hub"
        console.print(line, markup=False, soft_wrap=True)
