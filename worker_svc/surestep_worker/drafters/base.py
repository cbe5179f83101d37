"""The interfaces of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from surestep_common.invariants import IntArray
    from surestep_kernels import KernelSet
    from surestep_kernels.choose import DrawParams
    from surestep_kernels.slot_state import SlotState
    from surestep_kernels.step_columns import HostColumn
    from surestep_kernels.table import StepOps

    from surestep_worker.cache.caches import Caches
    from surestep_worker.distributed.tensor_parallel import TensorParallel
    from surestep_worker.models import Model
    from surestep_worker.step.sampling import SamplingTable
    from surestep_worker.step.slots import Slots

    from .inputs import DraftInputs, DraftShape, HeadInputs


class Drafts(NamedTuple):
    """Proposed continuations. Columns of `ids` from `counts` on are unused but hold valid ids."""

    ids: torch.Tensor  # i64[R,K]
    counts: torch.Tensor  # i64[R]
    non_finite: torch.Tensor | None = None  # bool[R]: rows cut short by non-finite logits
    looked_up: torch.Tensor | None = None  # i32[R] of `counts`; None: nothing was looked up


class DraftContext(NamedTuple):
    """What a drafter may use of the rank whose model it drafts for."""

    model: Model
    caches: Caches
    slots: Slots
    sampling: SamplingTable
    tp: TensorParallel
    kernels: KernelSet
    device: torch.device
    max_draft_tokens: int


class Drafter(Protocol):
    """Guesses the next tokens of running requests. A wrong guess costs time, never a token."""

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        max_drafts: torch.Tensor,
    ) -> Drafts:
        """Draft for every VERIFY row of a step, at its start.

        Must be a function of its arguments and of committed state alone. A drafter without state
        runs on rank 0 only.

        Args:
            tokens: i32[S,W] token table.
            slots: i64[R].
            lengths: i64[R] known tokens: tokens[slot, :length]; what lies behind is stale.
            max_drafts: i64[R] most drafts allowed, which the returned counts never exceed.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A drafter with state of its own, which follows what is committed."""

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """Learn how many drafts of slots [R] were accepted. All ranks observe the same."""
        ...


class DraftSteps(Protocol):
    """What a DeviceDrafter queues on the device within a step, without waiting for it."""

    def inputs(
        self,
        slot: IntArray,
        max_drafts: IntArray,
        room: IntArray,
        draw: DrawParams[HostColumn],
    ) -> HeadInputs[HostColumn]:
        """Return the inputs of rows [R], each with room for `room` positions to catch up with."""
        ...

    def draft(
        self, rows: DraftInputs, sent: HeadInputs, shape: DraftShape, error: torch.Tensor
    ) -> Drafts:
        """Catch up with what is committed, then draft. All columns are i32."""
        ...


@runtime_checkable
class DeviceDrafter(KeepsState, Protocol):
    """A drafter whose work is launched with the rest of a step, on any device."""

    @property
    def looks_up(self) -> bool:
        """Whether what repeats itself comes first, once it serves and where reading is free."""
        ...

    def serve(self) -> None:
        """Note that all steps from now on are of requests: it has been tried out."""
        ...

    def on_device(self, ops: StepOps, state: SlotState) -> DraftSteps:
        """Return the drafter's part of a step, given the slots on the device and the step's ops."""
        ...


@runtime_checkable
class StatefulDrafter(Drafter, KeepsState, Protocol):
    """A drafter with state that runs on the CPU. Every rank calls it with the same arguments."""

    def catch_up(self, slots: IntArray, start: IntArray, count: IntArray) -> None:
        """Bring the state up to date for positions start..start+count-1 of slots [R], count > 0.

        All of them are committed. `propose` needs the state of every committed position.
        """
        ...
