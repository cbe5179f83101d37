"""Draft models of speculators as the main argument: they name the model that they draft for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surestep_common.errors import InvalidRequest
from surestep_common.model_files import read_object

_WITHOUT = '`surestep serve MODEL --speculative-config \'{{"model": "{}"}}\'`'


def verifier_of(folder: Path) -> str | None:
    """Return the model that a draft model was made for, a folder or a hub id; None for a model
    that drafts for no other.

    A name relative to the folder counts before all others. Raises InvalidRequest for a draft model
    that names none.
    """
    try:
        config = read_object(folder / "config.json")
    except InvalidRequest:  # the worker reports the problem
        return None
    about = config.get("speculators_config")
    if not isinstance(about, dict):
        _refuse_other_forms(folder, config)
        return None
    verifier = about.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{folder} is a draft model, and its config.json names no "
            f"speculators_config.verifier.name_or_path: {_WITHOUT.format(folder)}",
            param="model",
        )
    near = folder / Path(name).expanduser()
    return str(near.resolve()) if near.is_dir() else name


def _refuse_other_forms(folder: Path, config: dict[str, Any]) -> None:
    """Raise InvalidRequest for a draft model that has no place for the name of its model."""
    kinds = config.get("architectures")
    if isinstance(kinds, list) and any("eagle" in str(kind).lower() for kind in kinds):
        raise InvalidRequest(
            f"{folder} is a draft model, which drafts for another one: {_WITHOUT.format(folder)}",
            param="model",
        )
