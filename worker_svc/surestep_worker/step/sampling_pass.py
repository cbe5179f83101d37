"""The end of a step: logits, choice, commit, and what is reported to the host.

Which kernels run depends on the sampling parameters. The graph of a whole step holds those of steps
that only choose tokens from the logits as they are, in any way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from surestep_kernels.choose import Chosen
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.slot_state import SlotState
from surestep_kernels.table import StepOps
from surestep_proto import supervisor_pb2 as pb
from torch import Tensor

from surestep_worker.inputs.columns import Extras, PooledColumns, StepColumns
from surestep_worker.inputs.download import Packed
from surestep_worker.inputs.logprob_plan import score_positions

from .forward import PassOutputs
from .phases import Phases
from .rank_context import RankContext


class SamplingShape(NamedTuple):
    """What decides which kernels sample; everything else is on the device."""

    random: bool  # some window draws
    truncated: bool  # and restricts what it draws from
    max_num_logprobs: int = 0  # most alternatives of any scored position


ANY_CHOICE = SamplingShape(random=True, truncated=True)


class SamplingPass:
    """Queues it on the device. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self, context: RankContext, ops: StepOps, state: SlotState, phases: Phases
    ) -> None:
        self._context, self._ops, self._state, self._phases = context, ops, state, phases

    def __call__(
        self, columns: StepColumns, outputs: PassOutputs, extras: Extras, shape: SamplingShape
    ) -> Packed:
        """Queue the end of a step; return what the host reads."""
        num_pooled = len(extras.pooled.slot) if extras.pooled is not None else 0
        scored, pooled = outputs.hidden.split((len(outputs.hidden) - num_pooled, num_pooled))
        logits = self._context.model.logits(scored).float() if len(scored) else scored
        vectors, label_logits = self._pool(extras.pooled, pooled)
        self._phases.enter(pb.SAMPLING)
        keep = extras.scored is not None and extras.shaping != Shaping()  # shaping is in place
        raw = logits.clone() if keep else logits
        chosen = self._choose(columns, outputs, logits, extras.shaping, shape)
        report = self._ops.commit_step(
            outputs.rows, outputs.drafts, chosen, columns.stops, self._state
        )
        scores = () if extras.scored is None else score_positions(
            raw, chosen.ids, extras.scored, shape.max_num_logprobs
        )  # fmt: skip
        bits = self._bits(outputs)
        pooled = vectors, label_logits
        return Packed.of([report, outputs.error, bits, outputs.non_finite, *pooled, *scores])

    def _bits(self, outputs: PassOutputs) -> Tensor:
        """Return the number i64[1] by which ranks compare what they computed."""
        rows, valid = outputs.rows, outputs.inputs.valid
        bits = self._ops.fingerprint(outputs.hidden, rows, valid)
        if not outputs.choices.shape[1]:
            return bits
        return bits + self._ops.fingerprint(outputs.choices, rows, valid)

    def _pool(self, columns: PooledColumns | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return means f32[K, H] and label logits f32[K, L] of the rows that complete a vector."""
        nothing = torch.empty(0, 0, device=hidden.device)
        if columns is None:
            return nothing, nothing
        slot, row_slot, num_tokens, last, label_ids = (column.long() for column in columns)
        self._context.pooling.add(slot, hidden)
        means = self._context.pooling.mean(row_slot, num_tokens)
        if not label_ids.shape[1]:
            return means, nothing
        return means, self._context.model.logits(hidden[last]).float().gather(1, label_ids)

    def _choose(
        self,
        columns: StepColumns,
        outputs: PassOutputs,
        logits: Tensor,
        shaping: Shaping,
        shape: SamplingShape,
    ) -> Chosen:
        """Choose the token of every position. All ranks get the choice of rank 0."""
        window, inputs = columns.position_window, outputs.inputs
        z = logits[: len(window)]
        if not len(window):
            nothing = torch.zeros(0, dtype=torch.int32, device=z.device)
            return Chosen(nothing, nothing)
        if shaping != Shaping():
            slot = inputs.slots[outputs.rows.position_row.long()].int()
            where = Positions(window, slot, inputs.lengths, self._state.tokens)
            self._ops.shape_logits(z, where, shaping)
        chosen = self._ops.choose(
            z, window, inputs.lengths, columns.draw,
            random=shape.random, truncated=shape.truncated,
        )  # fmt: skip
        return Chosen._make(self._context.tp.broadcast(column) for column in chosen)
