"""Read the small files of a model folder: JSON, a tokenizer, templates.

They come from strangers. Their size is bounded before they are read, and so is what they become
when they are parsed. Nothing is read through a link to a place outside the folder, for clients see
a part of what these files say.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from .errors import InvalidRequest

MAX_BYTES = 64 << 20  # of a file; the longest published ones, tokenizers, have some 40 MB
# Keys of --hf-overrides that say what the gateway makes of a model's numbers.
OVERRIDES_OF_GATEWAY = frozenset(
    {
        "is_matryoshka",
        "matryoshka_dimensions",
        "classifier_from_token",
        "method",
        "is_original_qwen3_reranker",
    }
)
_MAX_VALUES = 1 << 22  # of a JSON file; an index of weights has one for each tensor


def read(path: Path) -> bytes:
    """Return the content of a file. Raise InvalidRequest naming it."""
    try:
        about = path.stat()  # first: opening a pipe may block for ever
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            raise InvalidRequest(
                f"{path} is not a file of at most {MAX_BYTES} bytes", param="model"
            )
        if not _lies_in_its_folder(path):
            raise InvalidRequest(
                f"{path} is a link to {path.resolve()}, outside the model folder: copy the file",
                param="model",
            )
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", param="model") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise InvalidRequest naming it."""
    text = read(path)
    if sum(map(text.count, (b"{", b"[", b","))) > _MAX_VALUES:
        raise InvalidRequest(f"{path} has more than {_MAX_VALUES} values", param="model")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="model") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raise InvalidRequest naming it."""
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{path} is not a JSON object", param="model")
    return parsed


def object_or_empty(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} if it cannot be read, which loading the model tells."""
    try:
        return read_object(path)
    except InvalidRequest:
        return {}


def verifier_named_in(config: dict[str, Any]) -> str | None:
    """Return the model that a draft model of speculators says in its config.json to draft for."""
    about = config.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None


def name_of(folder: Path) -> str:
    """Return the name of a model folder: its hub id if it lies in a cache of the hub's library."""
    cache, snapshots = folder.parent.parent.name, folder.parent.name
    if snapshots == "snapshots" and cache.startswith("models--"):
        return cache.removeprefix("models--").replace("--", "/")
    return folder.name


def _lies_in_its_folder(path: Path) -> bool:
    """Return whether a file is no link out of its folder, but to a blob of the hub's cache."""
    real = path.resolve()
    is_blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    return is_blob or real.is_relative_to(path.parent.resolve())
