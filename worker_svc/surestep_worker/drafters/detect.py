"""Detect what `--speculative-config` leaves out, from the draft model's name and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surestep_common.model_files import object_or_empty

from surestep_worker.heads import head_folder

_NAMES = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark", "eagle-": "eagle"}  # vLLM's


def filled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a method, and the number of drafts that the model was made for.

    What cannot be found stays out.
    """
    model = given.get("model")
    if not isinstance(model, str) or {"method", "num_speculative_tokens"} <= given.keys():
        return dict(given)
    config = object_or_empty(head_folder(model) / "config.json")
    found = {"method": _method(model, config), "num_speculative_tokens": _num_drafts(config)}
    return {**{key: value for key, value in found.items() if value is not None}, **given}


def _method(model: str, config: Mapping[str, Any]) -> str | None:
    # A folder's path may have the name of another method in it.
    for kind in (str(kind).lower() for kind in [*_kinds(config), model]):
        for part, method in _NAMES.items():
            if part in kind:
                return method
    return "draft_model" if config.get("architectures") else None  # an ordinary model


def _num_drafts(config: Mapping[str, Any]) -> int | None:
    """Return the number of drafts as speculators writes it, or that of a block of DFlash."""
    about = config.get("speculators_config")
    proposals = _listed(about.get("proposal_methods")) if isinstance(about, dict) else []
    first = proposals[0] if proposals else None
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if isinstance(count, int):
        return count
    block = config.get("block_size")
    fits = isinstance(block, int) and "dflash" in str(_kinds(config)).lower()
    return int(block) - 1 if block is not None and fits else None


def _kinds(config: Mapping[str, Any]) -> list[Any]:
    """Return what config.json says that the model is, the most telling first."""
    return [config.get("speculators_model_type"), *_listed(config.get("architectures"))]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
