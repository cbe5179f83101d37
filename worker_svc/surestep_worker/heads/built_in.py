"""Draft heads that come with the program, each in a folder with its card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surestep_common.gguf import is_gguf, model_folder

_HERE = Path(__file__).parent


def head_folder(name: str) -> Path:
    """Return the folder that `name` means: a folder, that of a GGUF file, or a head of these by its
    name."""
    if is_gguf(Path(name)) and Path(name).exists():
        return model_folder(Path(name))
    own = _HERE / name
    is_own = own.parent == _HERE and (own / "config.json").is_file() and not Path(name).exists()
    return own if is_own else Path(name)


def own_heads() -> Iterator[Path]:
    """Yield the folders of these heads."""
    yield from (file.parent for file in sorted(_HERE.glob("*/config.json")))
