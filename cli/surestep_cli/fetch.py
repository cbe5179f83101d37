"""What `surestep serve` needs on this machine before anything starts."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .model_source import ModelFolder, Source, check_quantization, resolve, resolve_tokenizer
from .serve_settings import ServeSettings


def fetch(settings: ServeSettings, console: Console) -> tuple[ModelFolder, Path | None]:
    """The model, and the folder of its tokenizer where that is another. Raises SurestepError."""
    token = settings.hf_token.get_secret_value() if settings.hf_token is not None else None
    source = Source(settings.revision, settings.download_dir, token)
    model = resolve(settings.model, console, source)
    if settings.revision is not None and model.name != settings.model:
        console.print(f"Warning: --revision does nothing: {model.path} is no model of the hub")
    if settings.quantization is not None:
        check_quantization(model.path, settings.quantization)
    if settings.tokenizer is None:
        return model, None
    source = source._replace(revision=settings.tokenizer_revision)
    return model, resolve_tokenizer(settings.tokenizer, console, source)
