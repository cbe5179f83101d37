"""Draft models of speculators as the main argument: they name the model that they draft for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surestep_common.errors import InvalidRequest
from surestep_common.model_files import object_or_empty, verifier_named_in

_WITHOUT = '`surestep serve MODEL --speculative-config \'{{"model": "{}"}}\'`'


def verifier_of(folder: Path) -> str | None:
    """Return the model that a draft model was made for, a folder or a hub id; None for a model
    that drafts for no other.

    A name relative to the folder counts before all others. Raises InvalidRequest for a draft model
    that names none.
    """
    config = object_or_empty(folder / "config.json")
    if not isinstance(config.get("speculators_config"), dict):
        _refuse_other_forms(folder, config)
        return None
    if (name := verifier_named_in(config)) is None:
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
