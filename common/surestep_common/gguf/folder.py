"""A model folder for a GGUF file: everything small is written out of its header once, and its
weights stay where they are.

So whatever takes a folder in Hugging Face format takes this one, each service by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from surestep_common.config import cache_dir
from surestep_common.errors import NotFound, SurestepError, Unavailable

from .header import Header
from .model_config import config_of, generation_config_of
from .parts import part_files, read_whole, whole_name
from .tokenizer import tokenizer_of

WEIGHTS = "model.gguf"  # in the folder: a link to the file
_FORMAT = 2  # of what is written: another number makes every folder anew
_TEMPLATE = "tokenizer.chat_template"


def is_gguf(path: Path) -> bool:
    """Return whether a path is meant to be a GGUF file."""
    return path.suffix == ".gguf" and not path.is_dir()


def model_folder(path: Path) -> Path:
    """Return the folder of a GGUF file, in the cache; it is written unless it is there.

    It is made anew for a file that has changed, and bears the name of the file. Of a file in parts
    `path` is the first. Raises NotFound without a file, InvalidRequest for one that is not served,
    and Unavailable if the cache cannot be written.
    """
    file = path.expanduser().absolute()  # links stay: parts are found by their names
    key = f"{_FORMAT} {file} {_versions(path.expanduser())}"
    home = cache_dir() / "gguf"
    place = home / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = place / whole_name(file)
    if folder.is_dir():
        return folder
    files = _contents(read_whole(file))
    try:
        _write(files, file, place)
    except OSError as error:
        why = error.strerror or error
        raise Unavailable(f"cannot keep the tokenizer of {path} in {home}: {why}") from error
    return folder


def weights_of(folder: Path) -> Path | None:
    """Return the GGUF file of a model folder, by the name that it has for the user; None: the
    folder has its weights otherwise."""
    link = folder / WEIGHTS
    if link.is_symlink():
        return folder / os.readlink(link)
    return link if link.exists() else None


def _versions(path: Path) -> list[tuple[int, int]]:
    """Return sizes and times of all parts. Raises NotFound."""
    versions = []
    for part in part_files(path):
        try:
            about = part.stat()
        except OSError as error:
            raise NotFound(f"cannot read {part}: {error.strerror}", param="model") from error
        versions.append((about.st_size, about.st_mtime_ns))
    return versions


def _served(path: Path) -> Path:
    """Raises ValueError, as validators do."""
    try:
        return model_folder(path) if is_gguf(path) else path
    except SurestepError as error:
        raise ValueError(error.message) from error


# A setting: the folder of a model, or a GGUF file, for which its folder stands then.
ModelPath = Annotated[Path, AfterValidator(_served)]


def _contents(header: Header) -> dict[str, str]:
    """Return the text of every file of the folder."""
    config, tokenizer = config_of(header), tokenizer_of(header)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): header.text(key)
        for key in header.metadata
        if key.startswith(f"{_TEMPLATE}.")
    }
    texts: dict[str, str] = {}
    about = tokenizer.config | {"model_max_length": config["max_position_embeddings"]}
    if _TEMPLATE in header.metadata:
        default = header.text(_TEMPLATE)
        if named:
            all_named = {"default": default, **named}
            about["chat_template"] = [{"name": n, "template": t} for n, t in all_named.items()]
        else:
            texts["chat_template.jinja"] = default
    jsons: Mapping[str, Any] = {
        "config.json": config,
        "generation_config.json": generation_config_of(header),
        "tokenizer.json": tokenizer.tokenizer,
        "tokenizer_config.json": about,
    }
    return texts | {
        name: json.dumps(content, ensure_ascii=False) for name, content in jsons.items()
    }


def _write(files: Mapping[str, str], weights: Path, place: Path) -> None:
    """Write the folder below `place`, which appears complete or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if place.is_dir():
            return
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            folder = partial / whole_name(weights)
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / WEIGHTS).symlink_to(weights)
            partial.chmod(0o755)  # services have users of their own
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
