"""Draft heads on this machine that name the model they draft for.

A head of speculators names it in config.json, any other in its card, README.md, as all derived
models of the hub do. A name is enough to look closer, not to trust: whether head and model fit, and
whether drafts are accepted, is seen at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import yaml
from huggingface_hub.constants import HF_HUB_CACHE
from surestep_common.model_files import name_of, object_or_empty, verifier_named_in

from .built_in import own_heads

_MOST_CARD = 1 << 16  # bytes that are read of a card
_ABOUT = re.compile(r"\A---\n(.*?)^---$", re.DOTALL | re.MULTILINE)  # the card's YAML
# Number formats at the end of a name: a head goes with all of them.
_FORMAT = re.compile(
    r"[-_.](?:awq|gptq|bnb|gguf|marlin|dynamic|quantized|ud|g\d+|fp8|nvfp4|mxfp4|int[48]|[48]bit"
    r"|w\d+a\d+|b?f(?:p)?(?:16|32)|i?q\d(?:_[a-z0-9]+)*)$"
)


def heads_for(model: Path, folder: Path | None) -> Iterator[Path]:
    """Yield the folders of heads that name this model: those that come with the program, then
    those in `folder`, or in the hub's cache without one."""
    wanted = set(map(_base, _names(model)))
    place = folder if folder is not None else Path(HF_HUB_CACHE)
    for head in chain(own_heads(), _below(place)):
        if not wanted.isdisjoint(map(_base, _models_of(head))):
            yield head


def _names(model: Path) -> Iterator[str]:
    """Yield what a model's folder is called: on the hub or on disk, and by config.json."""
    folder = model.resolve()
    yield name_of(folder)
    name = object_or_empty(folder / "config.json").get("_name_or_path")
    if isinstance(name, str) and name:
        yield name


def _base(name: str) -> str:
    """Return a model's name without owner, case and number format."""
    base, shorter = "", name.rstrip("/").rsplit("/", 1)[-1].lower()
    while base != shorter:
        base, shorter = shorter, _FORMAT.sub("", shorter)
    return base


def _below(place: Path) -> Iterator[Path]:
    """Yield model folders in a folder of such, or of the hub's cache; the newest of each first."""
    try:
        folders = sorted(place.iterdir())
    except OSError:
        return
    for folder in folders:
        snapshots = sorted((folder / "snapshots").glob("*"), key=_age, reverse=True)
        yield from (each for each in (folder, *snapshots) if (each / "config.json").is_file())


def _age(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _models_of(head: Path) -> Iterator[str]:
    """Yield the models that a folder says its weights draft for; none if it is no draft head."""
    config = object_or_empty(head / "config.json")
    if (name := verifier_named_in(config)) is not None:
        yield name
    kinds = config.get("architectures")
    named = str(kinds).lower() if isinstance(kinds, list) else ""
    if any(kind in named for kind in ("eagle3", "dflash")):
        yield from _card_names(head)


def _card_names(head: Path) -> Iterator[str]:
    try:
        with (head / "README.md").open(encoding="utf-8") as file:
            match = _ABOUT.match(file.read(_MOST_CARD))
        about = yaml.safe_load(match[1]) if match is not None else None
    except (OSError, ValueError, yaml.YAMLError):
        return
    bases = about.get("base_model") if isinstance(about, dict) else None
    yield from (str(base) for base in (bases if isinstance(bases, list) else [bases]) if base)
