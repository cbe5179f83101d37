"""The interfaces of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from surestep_common.invariants import BoolArray, IntArray
    from surestep_kernels import KernelSet
    from surestep_kernels.choose import DrawParams
    from surestep_kernels.slot_state import SlotState
    from surestep_kernels.step_columns import HostColumn
    from surestep_kernels.table import StepOps

    from surestep_worker.cache.caches import Caches
    from surestep_worker.distributed.tensor_parallel import TensorParallel
    from surestep_worker.models import Model

    from .inputs import DraftInputs, DraftShape, HeadInputs
    from .ngram import RecentAnswers


class Drafts(NamedTuple):
    """Proposed continuations. Columns of `ids` from `counts` on are unused but hold valid ids."""

    ids: torch.Tensor  # [R,K] i32 or i64
    counts: torch.Tensor  # [R] i32 or i64
    non_finite: torch.Tensor | None = None  # bool[R]: rows cut short by non-finite logits
    looked_up: torch.Tensor | None = None  # i32[R] of `counts`; None: nothing was looked up


class DraftContext(NamedTuple):
    """Parts of a rank that a drafter may use for the model it drafts for."""

    model: Model
    caches: Caches
    num_slots: int
    draws: Callable[[IntArray], BoolArray]  # which of slots [R] draw; the others are greedy
    tp: TensorParallel
    kernels: KernelSet
    device: torch.device
    max_draft_tokens: int
    reads_freely: bool  # launches complete before they return: reading their outputs is free
    recent: RecentAnswers | None = None  # of other requests; None: nothing is looked up apart


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

        Must be a function of its arguments alone. Where reading its drafts is free, it runs on
        rank 0 only.

        Args:
            tokens: i32[S,W] token table.
            slots: i64[R].
            lengths: i64[R] known tokens: tokens[slot, :length]; what lies behind is stale.
            max_drafts: i64[R] most drafts allowed, which the returned counts never exceed.
        """
        ...


class DraftSteps(Protocol):
    """Work that a DeviceDrafter queues on the device within a step, without waiting for it."""

    def inputs(
        self,
        slot: IntArray,
        max_drafts: IntArray,
        room: IntArray,
        draw: DrawParams[HostColumn],
    ) -> HeadInputs[HostColumn]:
        """Return the inputs of rows [R], each with room for `room` positions to catch up with."""
        ...

    def look_up(self, slots: torch.Tensor, room: torch.Tensor) -> Drafts:
        """Return what followed last time in slots [R], at most `room` [R]. All columns are i32.

        Only of a drafter that looks up."""
        ...

    def draft(
        self, rows: DraftInputs, sent: HeadInputs, shape: DraftShape, error: torch.Tensor
    ) -> Drafts:
        """Catch up with what is committed, then draft. All columns are i32."""
        ...


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter with state of its own, whose work is launched with the rest of a step."""

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """Learn how many drafts of slots [R] were accepted. All ranks observe the same."""
        ...

    def serve(self) -> None:
        """Note that all steps from now on are of requests: it has been tried out."""
        ...

    def on_device(self, ops: StepOps, state: SlotState) -> DraftSteps:
        """Return the drafter's part of a step, given the slots on the device and the step's ops."""
        ...
