"""Work that a step queues on the device: draft, gather, forward; then logits, choice and commit.

The first part reads the slots and what the host has sent, and never waits for the host: a CUDA
graph can hold it. Its outputs are small, because every graph keeps memory for them; intermediate
tensors share it. Sampling parameters decide which kernels the second part runs. The graph of a
whole step holds those of steps that only choose tokens from the logits as they are, in any way.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from surestep_kernels.choose import Chosen
from surestep_kernels.gather_step import StepInputs
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import StepOps
from surestep_proto import supervisor_pb2 as pb
from torch import Tensor

from surestep_worker.adapters.kernels import AdaptedRows
from surestep_worker.cache.caches import Caches
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.layers.pooling import PoolingSums
from surestep_worker.models import Model

from .batch import Extras, Pooled, StepColumns
from .drafting import Drafted, Drafting
from .heartbeat import Phases
from .logprobs import score
from .transfer import Packed

_PROMPT_ROWS = 256  # of prompts, whose logits are held at once


class Shape(NamedTuple):
    """Shape that decides which kernels of a step run; everything else is on the device."""

    max_tokens: int  # of a row
    draft: DraftShape  # random, truncated: true of the windows' choices, too
    max_num_logprobs: int = 0  # most alternatives of any scored position


class PassOutputs(NamedTuple):
    """Results of a pass for sampling, on the device."""

    rows: StepRows
    drafts: DraftIds
    non_finite: Tensor  # i32[R] 1: drafting met non-finite logits
    drafter_failed: bool  # there are no drafts then
    inputs: StepInputs
    hidden: Tensor  # [N + P + Q, H] final, of sampled, scored and pooled positions
    choices: Tensor  # i32[N + P + Q, L] what indexers chose for them, where ranks compare it
    error: Tensor  # i32[1] error word of slot_state
    packed: Packed | None = None  # results for the host; None: sampling is not queued yet


class ForwardPass:
    """Queues passes on the device. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        model: Model,
        caches: Caches,
        ops: StepOps,
        state: SlotState,
        drafting: Drafting,
        phases: Phases,
        adapted: AdaptedRows,
    ) -> None:
        self._model, self._caches, self._ops, self._state = model, caches, ops, state
        self._adapted = adapted
        self._drafting, self._phases = drafting, phases

    def __call__(
        self,
        columns: StepColumns,
        shape: Shape,
        drafted: Drafted | None = None,
        adapters: Tensor | None = None,
    ) -> PassOutputs:
        """Queue a pass, drafting included unless `drafted` holds the drafts already.

        `adapters` i32[T]: see Extras.
        """
        rows, kv = columns.rows, self._caches.kv
        if drafted is None:
            most = columns.max_drafts
            draft_inputs = DraftInputs(rows.slot, most, most, rows.catch_up, columns.head)
            self._phases.enter(pb.DRAFTING)
            drafted = self._drafting.run(draft_inputs, shape.draft)
        self._phases.enter(pb.FORWARD)
        rows, error = rows._replace(catch_up=drafted.catch_up), drafted.error
        gathered = self._ops.gather_step(
            rows, drafted.drafts, self._state, error, kv.spec.block_size, kv.num_blocks
        )
        with self._adapted.of_step(adapters) if adapters is not None else nullcontext():
            made = self._forward(rows, gathered, columns.hidden_index, shape.max_tokens)
        return PassOutputs(
            rows, drafted.drafts, drafted.non_finite, drafted.failed, gathered, *made, error
        )

    def _forward(
        self, rows: StepRows, inputs: StepInputs, hidden_index: Tensor, max_tokens: int
    ) -> tuple[Tensor, Tensor]:
        none = torch.empty(len(hidden_index), 0, dtype=torch.int32, device=hidden_index.device)
        if not len(inputs.token_ids):  # the plan only frees slots
            return torch.empty(0, 1, device=hidden_index.device), none
        index = hidden_index.long()
        batch = _batch(self._state, rows, inputs, index, max_tokens)
        hidden = self._model.forward(batch, self._caches)
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


class SamplingPass:
    """Queues it on the device. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        model: Model,
        pooling: PoolingSums,
        tp: TensorParallel,
        ops: StepOps,
        state: SlotState,
        phases: Phases,
    ) -> None:
        self._model, self._pooling, self._tp = model, pooling, tp
        self._ops, self._state, self._phases = ops, state, phases

    def __call__(
        self, columns: StepColumns, outputs: PassOutputs, extras: Extras, shape: Shape
    ) -> Packed:
        """Queue the end of a step; return what the host reads."""
        num_pooled = len(extras.pooled.slot) if extras.pooled is not None else 0
        windows = len(columns.position_window)
        hidden, pooled = outputs.hidden.split((len(outputs.hidden) - num_pooled, num_pooled))
        hidden, prompts = hidden[:windows], hidden[windows:]
        logits = self._model.logits(hidden).float() if windows else hidden
        vectors, label_logits = self._pool(extras.pooled, pooled)
        self._phases.enter(pb.SAMPLING)
        keep = extras.scored is not None and extras.shaping != Shaping()  # shaping is in place
        raw = logits.clone() if keep else logits
        chosen = self._choose(columns, outputs, logits, extras.shaping, shape)
        report = self._ops.commit_step(
            outputs.rows, outputs.drafts, chosen, columns.stops, self._state
        )
        scores = self._score(raw, chosen.ids, prompts, extras, shape.max_num_logprobs)
        bits = self._bits(outputs)
        pooled = vectors, label_logits
        return Packed.of([report, outputs.error, bits, outputs.non_finite, *pooled, *scores])

    def _score(
        self, logits: Tensor, chosen: Tensor, prompts: Tensor, extras: Extras, width: int
    ) -> tuple[Tensor, ...]:
        """Return the scores of the positions that are scored; nothing if none is.

        Prompts are scored some rows at a time: the memory that serving leaves free for a step has
        to hold their logits, and is measured.
        """
        if extras.scored is None or extras.prompt_ids is None:
            return ()
        ids = extras.prompt_ids.long()
        index = extras.scored[: len(extras.scored) - len(ids)].long()
        parts = [score(logits[index], chosen[index].long(), width)] if len(index) else []
        for first in range(0, len(ids), _PROMPT_ROWS):
            rows = slice(first, min(first + _PROMPT_ROWS, len(ids)))
            parts.append(score(self._model.logits(prompts[rows]).float(), ids[rows], width))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _bits(self, outputs: PassOutputs) -> Tensor:
        """Return the number i64[1] by which ranks compare what they computed."""
        rows, valid = outputs.rows, outputs.inputs.valid
        bits = self._ops.fingerprint(outputs.hidden, rows, valid)
        if not outputs.choices.shape[1]:
            return bits
        return bits + self._ops.fingerprint(outputs.choices, rows, valid)

    def _pool(self, pooled: Pooled | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return means f32[K, H] and label logits f32[K, L] of the rows that complete a vector."""
        nothing = torch.empty(0, 0, device=hidden.device)
        if pooled is None:
            return nothing, nothing
        self._pooling.add(pooled.slot.long(), hidden)
        means = self._pooling.mean(pooled.row_slot.long(), pooled.num_tokens.long())
        if not pooled.label_ids.shape[1]:
            return means, nothing
        logits = self._model.logits(hidden[pooled.last.long()]).float()
        return means, self._tp.broadcast(logits.gather(1, pooled.label_ids.long()))

    def _choose(
        self,
        columns: StepColumns,
        outputs: PassOutputs,
        logits: Tensor,
        shaping: Shaping,
        shape: Shape,
    ) -> Chosen:
        """Choose the token of every position. All ranks get the choice of rank 0."""
        window, inputs = columns.position_window, outputs.inputs
        if not len(window) or self._tp.rank:
            nothing = torch.zeros(len(window), dtype=torch.int32, device=logits.device)
            chosen = Chosen(nothing, nothing)
            return Chosen._make(self._tp.broadcast_columns(*chosen)) if len(window) else chosen
        if shaping != Shaping():
            slot = inputs.slots[outputs.rows.position_row.long()].int()
            where = Positions(window, slot, inputs.lengths, self._state.tokens)
            self._ops.shape_logits(logits, where, shaping)
        chosen = self._ops.choose(
            logits,
            window,
            inputs.lengths,
            columns.draw,
            random=shape.draft.random,
            truncated=shape.draft.truncated,
        )
        return Chosen._make(self._tp.broadcast_columns(*chosen))
