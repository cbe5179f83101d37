"""Downloads from the Hugging Face hub: models, tokenizers, GGUF files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from surestep_common.errors import InvalidRequest, NotFound, Unavailable
from surestep_common.gguf.parts import part_files, whole_name

_TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "*.jinja")
_TEXT_FILES = ("*.json", "*.model", "*.txt", "*.jinja")  # all that a gateway reads
_MODEL_FILES = (*_TEXT_FILES, "*.safetensors")
# The hub's patterns match whole paths, folders included. Weights are served from the model's folder
# alone; what some repositories have below it is the same in another layout, as large again.
_OTHER_LAYOUTS = ("*/*.safetensors",)
_NO_MODELS = ("*mmproj*", "*imatrix*")  # GGUF files beside those of a model
_DYNAMIC = ("*[-._/]UD-*", "UD-*")  # other mixtures of types, beside the usual one of that name
_KIND = re.compile(r"[\w.-]+")  # of a GGUF file: Q4_K_M
_KIND_OF = r"(?:.*[-._])?{}"  # how files of a kind are called, but for their parts


class ModelSource(NamedTuple):
    """Where to download a folder from that is not on this machine yet."""

    revision: str | None = None
    download_dir: Path | None = None
    token: str | None = None


_ASK_S = 10.0  # for a list of files, which is asked for once

HUB = ModelSource()
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?P<kind>:[\w.-]+)?(?:/(?:tree|blob|resolve)/(?P<revision>[^/]+)(?P<file>/.*)?)?/?"
)
_LIBRARIES = ("ollama://", "ollama.com/", "registry.ollama.ai/")


def is_url(name: str) -> bool:
    """Return whether a name is a URL, or one of the hub without its beginning."""
    return "://" in name or _URL.fullmatch(name) is not None


class HubName(NamedTuple):
    """Name of a model on the hub as this program writes it, and where it is downloaded from."""

    name: str
    source: ModelSource


def hub_name(written: str, source: ModelSource) -> HubName:
    """Read a hub id, or a URL of the hub, with or without its beginning and the path of a file.

    Raises InvalidRequest for other URLs, and for names of other hubs.
    """
    bare = written.partition("?")[0]
    if (url := _URL.fullmatch(bare)) is not None:
        file = url["file"] or ""
        kind = f":{_ending(Path(file))}" if file.endswith(".gguf") else url["kind"] or ""
        wanted = source.revision or url["revision"]
        return HubName(url["repository"] + kind, source._replace(revision=wanted))
    library = any(name in bare for name in _LIBRARIES)
    if library or (":" in bare and "/" not in bare):
        raise InvalidRequest(
            f"'{written}' is a name of ollama's library, which is not read here: name a GGUF file "
            "of the Hugging Face hub, as owner/name:Q4_K_M, or one on this machine",
            param="model",
        )
    if "://" in bare:
        raise InvalidRequest(
            f"'{written}' is no URL of the Hugging Face hub: download the file and name that",
            param="model",
        )
    return HubName(written, source)


def hub_model(
    model: str, console: Console, source: ModelSource, *, text_only: bool = False
) -> Path:
    """Return the folder of a model; with `text_only`, without its weights.

    Raises Unavailable if the hub does not give it, and NotFound if it has GGUF files alone.
    """
    files = _TEXT_FILES if text_only else _MODEL_FILES
    folder = _snapshot(model, files, _OTHER_LAYOUTS, console, source)
    whole = text_only or any(folder.glob("*.safetensors"))
    complete = whole and (folder / "config.json").is_file()
    if not complete and (kinds := _kinds(model, source)):
        raise NotFound(
            f"'{model}' holds GGUF files: name one of them, as {model}:{kinds[0]}; "
            f"there are {', '.join(kinds)}"
        )
    return folder


def hub_tokenizer(name: str, source: ModelSource, console: Console) -> Path:
    """Return a folder with the tokenizer of a repository. Raises Unavailable."""
    return _snapshot(name, _TOKENIZER_FILES, (), console, source)


def hub_gguf(repository: str, kind: str, console: Console, source: ModelSource) -> Path:
    """Return the GGUF file of a repository that is of `kind`, Q4_K_M for one, or its first part.

    Raises Unavailable if the hub does not give it, and NotFound if there is none.
    """
    if not _KIND.fullmatch(kind):
        raise NotFound(f"'{repository}:{kind}': after the colon comes a type, such as Q4_K_M")
    spellings = sorted({kind, kind.upper(), kind.lower()})
    begins, ends = ("*[-._/]", ""), (".gguf", "-*-of-*.gguf")
    patterns = [f"{begin}{each}{end}" for each in spellings for begin in begins for end in ends]
    others = () if kind.upper().startswith("UD-") else _DYNAMIC
    folder = _snapshot(repository, patterns, (*_NO_MODELS, *others), console, source)
    wanted = re.compile(_KIND_OF.format(re.escape(kind)), re.IGNORECASE)
    found = [
        file
        for file in folder.rglob("*.gguf")
        if wanted.fullmatch(whole_name(file)) and file == part_files(file)[0]
    ]
    if not found:
        kinds = _kinds(repository, source)
        has = f"there are {', '.join(kinds)}" if kinds else "there are no GGUF files"
        raise NotFound(f"'{repository}' holds no GGUF file of type {kind}: {has}")
    return min(found, key=lambda file: (len(str(file)), file))


def _kinds(repository: str, source: ModelSource) -> list[str]:
    """Return how the GGUF files of a repository end, the most usual first; [] if unknown."""
    from huggingface_hub import HfApi

    try:
        hub = HfApi(token=source.token)
        about = hub.model_info(repository, revision=source.revision, timeout=_ASK_S)
        files = [file.rfilename for file in about.siblings or ()]
    except Exception:  # noqa: BLE001  # of its HTTP client, too: a message is shorter then
        return []
    endings = {
        _ending(Path(file))
        for file in files
        if file.endswith(".gguf") and not any(fnmatch(file, pattern) for pattern in _NO_MODELS)
    }
    return sorted(endings, key=lambda ending: (ending.upper() != "Q4_K_M", ending))


def _ending(file: Path) -> str:
    return re.split(r"[-.]", whole_name(file))[-1]


def _snapshot(
    repository: str,
    files: Sequence[str],
    without: Sequence[str],
    console: Console,
    source: ModelSource,
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        console.print(f"Resolving {repository} on the Hugging Face hub")
        folder = snapshot_download(
            repository,
            revision=source.revision,
            cache_dir=source.download_dir,
            token=source.token,
            allow_patterns=list(files),
            ignore_patterns=list(without),
        )
        return Path(folder)
    except Exception as error:  # of its HTTP client, too, whichever it has
        if isinstance(error, OSError) and error.filename is not None:
            raise Unavailable(
                f"cannot keep '{repository}' in {error.filename}: {error.strerror}"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Unavailable(
            f"cannot fetch '{repository}' from the Hugging Face hub: {reason} "
            "(a folder in Hugging Face format works without a network)"
        ) from error
