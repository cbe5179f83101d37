"""The commands that are a few lines each."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from importlib.resources import files
from pathlib import Path

import surestep_proto
from pydantic import SecretStr
from rich.console import Console
from surestep_common.errors import InvalidRequest, Unavailable

from .api.http import api_root, call
from .serve.hub import ModelSource
from .serve.model_source import resolve
from .serve.wiring import SECRET_BYTES

_RESTART_S = 3600.0  # the server has time limits of its own, for each scheduler


def fetch(
    model: str | None, link: Path | None, source: ModelSource, console: Console, *, text_only: bool
) -> None:
    """Print the folder of `model` on stdout, alone on its line for use in scripts.

    With `link`, that path becomes a symbolic link to the folder. Raises InvalidRequest when
    something else is there, Unavailable when it cannot be written.
    """
    folder = resolve(model, console, source, text_only=text_only)
    if link is not None:
        _point(link, folder.path)
    Console(soft_wrap=True, highlight=False).print(str(folder.path), markup=False)


def import_gguf(gguf: Path, folder: Path, console: Console) -> None:
    """Convert `gguf` and name each stage as it starts."""
    from surestep_worker.checkpoint.import_gguf import import_gguf as convert

    with console.status("loading the converter") as status:
        convert(gguf, folder, lambda stage: status.update(f"{gguf.name}: {stage}"))
    console.print(f"{gguf.name} converted into {folder}", markup=False, soft_wrap=True)


def restart_workers(url: str, admin_key: SecretStr, reason: str | None, console: Console) -> int:
    """Have every worker replaced and print the result. Raise Unavailable, Unauthenticated."""
    try:
        answer = call(
            f"{api_root(url)}/admin/workers/restart",
            {"reason": reason} if reason else {},
            api_key=admin_key,
            timeout_s=_RESTART_S,
        )
    except OSError as error:
        raise Unavailable(f"no answer from {url}: {error}") from error
    body = answer.body or {}
    for one in body.get("restarted", ()):
        console.print(
            f"{one['scheduler']}: {one['num_ranks']} workers replaced, serving again after"
            f" {one['seconds']:.1f} s",
            markup=False,
        )
    if answer.status != 200:
        message = body.get("error", {}).get("message", f"HTTP {answer.status}")
        raise Unavailable(f"{body.get('failed', url)}: {message}")
    return 0


def new_secret(path: Path) -> None:
    """Write a new secret to a file unless it exists: several services may try at once.

    Raise Unavailable when it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as scratch:
            scratch.write(secrets.token_urlsafe(SECRET_BYTES) + "\n")
            scratch.flush()
            with contextlib.suppress(FileExistsError):
                os.link(scratch.name, path)  # whole, or not at all
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from error


def proto(folder: Path | None) -> None:
    """Print the .proto files on stdout, or write them below `folder` as they import each other.

    Raises Unavailable when they cannot be written.
    """
    package = files(surestep_proto)
    texts = {
        f"{package.name}/{file.name}": file.read_text()
        for file in sorted(package.iterdir(), key=lambda entry: entry.name)
        if file.name.endswith(".proto")
    }
    if folder is None:
        out = Console(soft_wrap=True, highlight=False)
        for name, text in texts.items():
            out.print(f"// {name}\n{text}", markup=False, emoji=False)
        return
    try:
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise Unavailable(f"cannot write into {folder}: {error.strerror}") from error


def _point(link: Path, target: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise InvalidRequest(f"{link} exists and is no symbolic link", param="link")
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(target)
        fresh.replace(link)  # a reader sees the old target or the new one
    except OSError as error:
        raise Unavailable(f"cannot write the link {link}: {error.strerror}") from error
