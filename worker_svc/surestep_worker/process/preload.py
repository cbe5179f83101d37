"""Import everything that a rank needs, so that a standby has nothing left to import.

No device is touched: a standby runs beside the rank that uses it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

from surestep_common.errors import InvalidRequest
from surestep_common.model_files import object_or_empty

from surestep_worker.config import WorkerSettings
from surestep_worker.configs.model_config import architecture_of
from surestep_worker.models.families import is_theirs
from surestep_worker.startup.build import build_runner

if TYPE_CHECKING:
    from .rank import Build

# Modules that a rank imports lazily.
_LATE = (
    "surestep_worker.drafters.head",
    "surestep_worker.drafters.ngram",
    "surestep_worker.drafters.temperature",
    "torch.distributed",
)
_LATE_ON_CUDA = ("torch.distributed._symmetric_memory",)


def import_all(settings: WorkerSettings) -> Build:
    """Import all modules; return the function that loads the model."""
    for module in _LATE if settings.device == "cpu" else _LATE + _LATE_ON_CUDA:
        importlib.import_module(module)
    if _is_theirs(settings):
        if settings.device == "cpu":  # transformers imports a compiler, and that one Triton
            sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # is not to be found
        importlib.import_module("surestep_worker.models.transformers")
    return build_runner


def _is_theirs(settings: WorkerSettings) -> bool:
    """Return whether transformers' code computes the model, as far as can be read."""
    if settings.model is None:
        return False
    config = object_or_empty(settings.model / "config.json")
    with contextlib.suppress(InvalidRequest):  # the rank will say what is wrong
        return is_theirs(architecture_of(config), settings.model_impl)
    return False
