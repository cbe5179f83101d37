"""One implementation of the ops of a step, to be compared with the references."""

from __future__ import annotations

from typing import NamedTuple

from surestep_kernels.table import StepOps


class StepColumn(NamedTuple):
    """Ops, and the device on which they run."""

    ops: StepOps
    device: str
