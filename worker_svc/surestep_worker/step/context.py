"""The parts of a rank, as its steps see them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_kernels.compilations import Compilations
from surestep_kernels.table import StepOps

from surestep_worker.cache.caches import Caches
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DeviceDrafter, Drafter
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.host.heartbeat import Heartbeat
from surestep_worker.host.threads import StepThreads
from surestep_worker.layers.pooling import PoolingSums
from surestep_worker.models import Model

from .sampling import SamplingTable
from .slots import Slots


class RankContext(NamedTuple):
    """The parts that steps of one rank use."""

    model: Model
    caches: Caches
    slots: Slots
    sampling: SamplingTable
    grammars: GrammarTable
    pooling: PoolingSums
    drafter: Drafter | DeviceDrafter | None
    max_draft_tokens: int  # that the drafter proposes for a window
    most_drafts: int  # of a window, those that its grammar forces included
    tp: TensorParallel
    device: torch.device
    heartbeat: Heartbeat
    step_ops: StepOps
    use_graphs: bool  # capture steps, unless launches are synchronous
    max_step_tokens: int
    compilations: Compilations
    threads: StepThreads | None  # None: their number is settled

    @property
    def synchronous(self) -> bool:
        """Whether launches complete before they return, so that reading their outputs is free."""
        return self.step_ops.synchronous

    @property
    def looks_up(self) -> bool:
        """Whether the drafter looks up what repeats itself before it drafts."""
        drafter = self.drafter
        return self.synchronous and isinstance(drafter, DeviceDrafter) and drafter.looks_up
