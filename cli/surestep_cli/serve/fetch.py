"""What `surestep serve` downloads and prepares before anything starts."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from surestep_cli.settings.serve_settings import ServeSettings

from .model_source import ModelFolder, ModelSource, check_quantization, resolve, resolve_tokenizer


def fetch(settings: ServeSettings, console: Console) -> tuple[ModelFolder, Path | None]:
    """Return the model, and the folder of its tokenizer if that is another. Raise SurestepError."""
    token = settings.hf_token.get_secret_value() if settings.hf_token is not None else None
    source = ModelSource(settings.revision, settings.download_dir, token)
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


def _tell_idle(flag: str, value: str | None, folder: Path, console: Console) -> None:
    if value is not None:
        line = f"Warning: {flag} does nothing: {folder} is no model of the hub"
        console.print(line, markup=False, soft_wrap=True)
