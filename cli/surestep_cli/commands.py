"""The commands that are a few lines each."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .model_source import resolve


def fetch(model: str | None, console: Console) -> None:
    """Print the folder of `model` on stdout, alone on its line for use in scripts."""
    folder = resolve(model, console)
    Console(soft_wrap=True, highlight=False).print(str(folder.path), markup=False)


def import_gguf(gguf: Path, folder: Path, console: Console) -> None:
    """Convert `gguf` and name each stage as it starts."""
    from surestep_worker.import_gguf import import_gguf as convert

    with console.status("loading the converter") as status:
        convert(gguf, folder, lambda stage: status.update(f"{gguf.name}: {stage}"))
    console.print(f"{gguf.name} converted into {folder}", markup=False, soft_wrap=True)
