"""What the execution of steps on one rank is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_kernels.compilations import Compilations
from surestep_kernels.step.step_ops import StepOps

from surestep_worker.cache.caches import Caches
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DeviceDrafter, Drafter
from surestep_worker.host.heartbeat import Heartbeat
from surestep_worker.layers.pooling import PoolingSums
from surestep_worker.ledger.slots import Slots
from surestep_worker.models import Model
from surestep_worker.sampling.table import SamplingTable


class RankContext(NamedTuple):
    """What a runner is made of; each part is used for what its name says and nothing else."""

    model: Model
    caches: Caches
    slots: Slots
    sampling: SamplingTable
    pooling: PoolingSums
    drafter: Drafter | DeviceDrafter | None
    max_draft_tokens: int
    tp: TensorParallel
    device: torch.device
    heartbeat: Heartbeat
    step_ops: StepOps
    use_graphs: bool  # capture steps before the first one, unless they are synchronous
    max_step_tokens: int
    compilations: Compilations

    @property
    def synchronous(self) -> bool:
        """Whether a launch is over when it returns, and reading what it wrote is free."""
        return self.step_ops.synchronous
