"""Import everything that a rank needs, so that a standby has nothing left to import.

No device is touched: a standby runs beside the rank that uses it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from surestep_worker.config import WorkerSettings
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
    return build_runner
