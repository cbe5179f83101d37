"""The part of a step that is alike in all steps of one shape: draft, gather, forward.

It reads the slots and what the host has sent, and never waits for the host: a CUDA graph can hold
it. Its outputs are small, because every graph keeps memory for them; intermediate tensors share it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_kernels.gather_step import StepInputs
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.table import StepOps
from surestep_proto import supervisor_pb2 as pb
from torch import Tensor

from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.inputs.columns import PassInputs
from surestep_worker.inputs.geometry import Geometry
from surestep_worker.layers.batch import GroupPages, StepBatch
from surestep_worker.sampling.table import SamplingBatch

from .drafting import Drafted, Drafting
from .phases import Phases
from .rank_context import RankContext


class PassShape(NamedTuple):
    """What decides which kernels of a pass run; everything else is on the device."""

    max_tokens: int  # of a row
    draft: DraftShape

    @classmethod
    def of(cls, geometry: Geometry, sampling: SamplingBatch[HostColumn]) -> PassShape:
        """Return the shape of a pass that is launched for one step alone."""
        most_drafts = int(geometry.max_drafts.max(initial=0))
        most_behind = int(geometry.rows.catch_up.max(initial=0))
        draft = DraftShape(most_drafts, most_behind, sampling.random, sampling.truncated)
        return cls(int(geometry.width.max(initial=0)), draft)


class PassOutputs(NamedTuple):
    """What a pass leaves for sampling, on the device."""

    rows: StepRows
    drafts: DraftIds
    non_finite: Tensor  # i32[R] 1: drafting met non-finite logits
    drafter_failed: bool  # there are no drafts then
    inputs: StepInputs
    hidden: Tensor  # [N + P + Q, H] final, of sampled, scored and pooled positions
    choices: Tensor  # i32[N + P + Q, L] what indexers chose for them, where ranks compare it
    error: Tensor  # i32[1] error word of slot_state


class ForwardPass:
    """Queues passes on the device. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        context: RankContext,
        ops: StepOps,
        state: SlotState,
        drafting: Drafting,
        phases: Phases,
    ) -> None:
        self._context, self._ops, self._state, self._drafting = context, ops, state, drafting
        self._phases = phases

    def __call__(
        self, inputs: PassInputs, shape: PassShape, drafted: Drafted | None = None
    ) -> PassOutputs:
        """Queue a pass, drafting included unless `drafted` holds the drafts already."""
        rows, kv = inputs.rows, self._context.caches.kv
        if drafted is None:
            most = inputs.max_drafts
            draft_inputs = DraftInputs(rows.slot, most, most, rows.catch_up, inputs.head)
            drafted = self.draft(draft_inputs, shape.draft)
        self._phases.enter(pb.FORWARD)
        rows, error = rows._replace(catch_up=drafted.catch_up), drafted.error
        gathered = self._ops.gather_step(
            rows, drafted.drafts, self._state, error, kv.spec.block_size, kv.num_blocks
        )
        made = self._forward(rows, gathered, inputs.hidden_index, shape.max_tokens)
        return PassOutputs(
            rows, drafted.drafts, drafted.non_finite, drafted.failed, gathered, *made, error
        )

    def draft(self, inputs: DraftInputs, shape: DraftShape) -> Drafted:
        self._phases.enter(pb.DRAFTING)
        return self._drafting.run(inputs, shape)

    def _forward(
        self, rows: StepRows, inputs: StepInputs, hidden_index: Tensor, max_tokens: int
    ) -> tuple[Tensor, Tensor]:
        none = torch.empty(len(hidden_index), 0, dtype=torch.int32, device=self._context.device)
        if not len(inputs.token_ids):  # the plan only frees slots
            return torch.empty(0, 1, device=self._context.device), none
        index = hidden_index.long()
        batch = _batch(self._state, rows, inputs, index, max_tokens)
        hidden = self._context.model.forward(batch, self._context.caches)
        sums = batch.choice.sums
        return hidden[index], torch.stack(sums, dim=1)[index] if sums else none


def _batch(
    state: SlotState, rows: StepRows, inputs: StepInputs, hidden_index: Tensor, max_tokens: int
) -> StepBatch:
    return StepBatch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        groups=tuple(
            GroupPages(
                AttentionRows(tables, inputs.slots, rows.cu_rows, inputs.start, max_tokens), places
            )
            for tables, places in zip(state.block_tables, inputs.kv_slots, strict=True)
        ),
        hidden_index=hidden_index,
        recurrent=RecurrentRows(
            slots=inputs.slots,
            cu_rows=rows.cu_rows,
            start=inputs.start,
            pending=inputs.pending,
            window=1 - rows.advances,
            snapshot_after=inputs.snapshot_after,
            snapshot_line=rows.snapshot_line,
            chunked=rows.chunked,
            max_tokens=max_tokens,
        ),
    )
