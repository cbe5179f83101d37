"""Drafting with a draft head, used again for every further draft.

The head's row for position i takes what was kept of the model at i, and token i + 1. What was kept
of all positions lies in the KV pages, so positions that were never drafted from can be caught up
with at any time. Rows of drafts themselves are written too, from the head's own output, and
overwritten when the next step catches up with what was accepted.

A head that reads no hidden states is a model of its own: its row for position i takes token i. Rows
that draft read the newest token besides what they catch up with, and again in the next step.

All given rows catch up and draft: what a row may not do is padding. Penalties, biases and bad words
of a request do not shape its drafts.

Where reading a result is free, text that repeats itself may be looked up first: what followed last
time is drafted then, and the head is not asked.
"""

from __future__ import annotations

import numpy as np
import torch
from surestep_common.invariants import FloatArray, IntArray
from surestep_kernels.choose import DrawParams, RowStatus
from surestep_kernels.gather_tokens import TokenInputs, TokenRuns
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent_rows import RecurrentRows
from surestep_kernels.slot_state import SlotState
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.table import StepOps
from torch import Tensor

from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.layers.draft_head import DraftHead

from .base import DraftContext, Drafts
from .inputs import DraftInputs, DraftShape, HeadInputs
from .ngram import NgramDrafter
from .temperature import DraftTemperature


class HeadDrafter:
    """The head, and how much flatter or sharper than the requests' its draws are."""

    def __init__(
        self,
        context: DraftContext,
        temperature: DraftTemperature,
        lookup: NgramDrafter | None = None,
    ) -> None:
        """`lookup` comes before the head once the rank serves: what is tried out is the head."""
        assert context.model.draft_head is not None, "the model was loaded without its draft head"
        self.head: DraftHead = context.model.draft_head
        self._context, self._temperature = context, temperature
        self.lookup: NgramDrafter | None = None
        self._lookup = lookup

    def serve(self) -> None:
        """Begin to look up what repeats itself, if that is wanted."""
        self.lookup = self._lookup

    def on_device(self, ops: StepOps, state: SlotState) -> HeadSteps:
        """Return what drafts, between the slots of a device and the ops of a step."""
        return HeadSteps(self, self._context, ops, state)

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        random = self._context.draws(slots)
        if random.any():
            self._temperature.observe(slots[random], n_drafts[random], n_accepted[random])

    def factors(self, slots: IntArray) -> FloatArray:
        """Return divisors f32[R] of the logits, 1 for greedy requests."""
        factors = np.ones(len(slots), dtype=np.float32)
        random = self._context.draws(slots)
        if random.any():
            factors[random] = self._temperature.choose(slots[random])
        return factors


class HeadSteps:
    """Drafts with the head of a HeadDrafter."""

    def __init__(
        self, drafter: HeadDrafter, context: DraftContext, ops: StepOps, state: SlotState
    ) -> None:
        self._drafter, self._context, self._ops = drafter, context, ops
        # What the head reads and writes is in group 0 of the KV cache, see KVLayout.
        self._state = state._replace(block_tables=state.block_tables[:1])
        self._ahead = int(drafter.head.reads_hidden)  # from a row's position to the token it takes
        self._newest = 1 - self._ahead  # tokens that rows read besides, when they draft
        self._states = context.caches.draft
        dtype, width = context.caches.kv.spec.dtype, drafter.head.width
        # Ranks that draft together run the same passes, whatever they find.
        self._may_stop = context.reads_freely and context.tp.size == 1
        # Output of the head for the newest committed position of each slot.
        self._seed = torch.zeros(len(state.known), width, dtype=dtype, device=context.device)

    def inputs(
        self,
        slot: IntArray,
        max_drafts: IntArray,
        room: IntArray,
        draw: DrawParams[HostColumn],
    ) -> HeadInputs[HostColumn]:
        """Return the inputs of rows [R], each with room for `room` positions to catch up with."""
        room = room + self._newest * (max_drafts > 0)
        factors = np.ones(len(slot), dtype=np.float32)
        null_slot = len(self._state.known) - 1
        drafts = np.flatnonzero((max_drafts > 0) & (slot < null_slot))
        factors[drafts] = self._drafter.factors(slot[drafts])
        cu = np.concatenate(([0], np.cumsum(room))).astype(np.int32)
        token_row = np.repeat(np.arange(len(room), dtype=np.int32), room)
        return HeadInputs(token_row, cu, draw, factors)

    def draft(
        self, rows: DraftInputs, sent: HeadInputs, shape: DraftShape, error: Tensor
    ) -> Drafts:
        slots, max_drafts, found = rows.slot.long(), rows.max_drafts, None
        if self._drafter.lookup is not None:
            found = self.look_up(rows.slot, rows.max_looked_up)
            max_drafts = max_drafts.masked_fill(found.counts > 0, 0)
        longest = shape.max_catch_up + self._newest * (shape.num_drafts > 0)
        if longest:
            catch_up = rows.catch_up + self._newest * (max_drafts > 0).int()
            self._catch_up(slots, catch_up, sent, longest, error)
        if self._states is not None:
            max_drafts = max_drafts * self._states.hold(slots, self._state.known[slots])
        drafts = self._propose(slots, max_drafts, sent, shape, error)
        if found is None:
            return drafts
        ids, counts = drafts.ids + found.ids, drafts.counts + found.counts
        return Drafts(ids, counts, drafts.non_finite, found.counts)

    def _propose(
        self, slots: Tensor, max_drafts: Tensor, sent: HeadInputs, shape: DraftShape, error: Tensor
    ) -> Drafts:
        """Draft after what is caught up with, one token after the other."""
        ids = self._no_ids(slots)
        counts, non_finite = torch.zeros_like(max_drafts), torch.zeros_like(max_drafts)
        hidden, known = self._seed[slots], self._state.known[slots]
        going = torch.ones_like(max_drafts)
        for step in range(shape.num_drafts):
            going = going * (max_drafts > step)
            if self._may_stop and not going.any():
                break
            row = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
            chosen, status = self._choose(hidden, row, known + step, sent, shape)
            non_finite |= going * (status == RowStatus.NON_FINITE)
            going = going * (status == RowStatus.OK)
            ids[:, step] = chosen * going
            counts += going
            self._write(slots, known + step, chosen, going)
            if step + 1 < shape.num_drafts:
                hidden = self._next(slots, known + step - self._ahead, going, hidden, error)
        return Drafts(ids, counts, non_finite)

    def _no_ids(self, slots: Tensor) -> Tensor:
        """Return zeros i32[R, K]."""
        most = self._context.max_draft_tokens
        return torch.zeros(len(slots), most, dtype=torch.int32, device=slots.device)

    def look_up(self, slots: Tensor, room: Tensor) -> Drafts:
        assert self._drafter.lookup is not None
        return self._drafter.lookup.look_up(self._state, slots, room)

    def _catch_up(
        self,
        slots: Tensor,
        catch_up: Tensor,
        sent: HeadInputs,
        max_tokens: int,
        error: Tensor,
    ) -> None:
        state, kept = self._state, self._context.caches.kv.hidden
        start = upto = state.drafter_len[slots]
        valid = torch.minimum(catch_up, state.committed[slots] + self._newest - upto)
        if self._states is not None:
            start, valid = self._states.left(slots, upto, upto + valid)
        runs = TokenRuns(sent.token_row, sent.cu_rows, slots, start, valid)
        tokens, states = self._gather(runs, error), self._states
        recurrent = states.begin(runs, max_tokens) if states is not None else None
        out = self._head(runs, tokens, kept[tokens.kv_slots[0]], max_tokens, recurrent)
        if states is not None:
            states.end(runs)
        last = (sent.cu_rows[:-1] + valid - 1).clamp(min=0).long()
        moved = (valid > 0).unsqueeze(1)
        self._seed[slots] = torch.where(moved, out[last], self._seed[slots])

    def _choose(
        self, hidden: Tensor, row: Tensor, length: Tensor, sent: HeadInputs, shape: DraftShape
    ) -> tuple[Tensor, Tensor]:
        """Ids and status i32[N], of drafts of rows i32[N]; rank 0 chooses for all."""
        head, tp = self._drafter.head, self._context.tp
        logits = head.logits(hidden)
        if tp.rank:
            ids, status = tp.broadcast_columns(torch.zeros_like(row), torch.zeros_like(row))
            return ids, status
        logits = logits / sent.factors[row.long()].unsqueeze(1)
        if shape.random and head.token_ids is not None:  # noise belongs to the model's ids
            logits = self._spread(logits, head.token_ids)
        ids, status = self._ops.choose(
            logits, row, length, sent.draw, random=shape.random, truncated=shape.truncated
        )
        if not shape.random and head.token_ids is not None:
            ids = head.token_ids[ids.long()].int()
        ids, status = tp.broadcast_columns(ids, status)
        return ids, status

    def _spread(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Logits f32[R, V] over the model's vocabulary; -inf of what the head cannot draft."""
        size = len(logits), self._context.model.config.vocab_size
        return logits.new_full(size, -torch.inf).index_copy_(1, token_ids, logits)

    def _write(self, slots: Tensor, place: Tensor, ids: Tensor, wanted: Tensor) -> None:
        """Write the drafts of rows with `wanted` 1 to their slots, where the head reads them."""
        tokens = self._state.tokens
        at = place.clamp(max=tokens.shape[1] - 1).long()
        tokens[slots, at] = torch.where(wanted > 0, ids, tokens[slots, at])

    def _next(
        self,
        slots: Tensor,
        position: Tensor,
        wanted: Tensor,
        hidden: Tensor,
        error: Tensor,
    ) -> Tensor:
        """Return the head's output [R, H] at positions [R] for which the newest draft is taken."""
        row = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        runs = TokenRuns(row[:-1], row, slots, position, wanted)
        recurrent = self._states.ahead(runs) if self._states is not None else None
        return self._head(runs, self._gather(runs, error), hidden, 1, recurrent)

    def _gather(self, runs: TokenRuns, error: Tensor) -> TokenInputs:
        """Return positions, each with the token that the head takes there."""
        kv = self._context.caches.kv
        return self._ops.gather_tokens(
            runs,
            self._state,
            error,
            shift=self._ahead,
            block_size=kv.spec.block_size,
            num_blocks=kv.num_blocks,
        )

    def _head(
        self,
        runs: TokenRuns,
        tokens: TokenInputs,
        hidden: Tensor,
        max_tokens: int,
        recurrent: RecurrentRows | None,
    ) -> Tensor:
        rows = AttentionRows(
            self._state.block_tables[0], runs.slots, runs.cu_rows, runs.start, max_tokens
        )
        none = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        pages = (GroupPages(rows, tokens.kv_slots[0]),)
        batch = StepBatch(*tokens[:2], groups=pages, hidden_index=none, recurrent=recurrent)
        return self._drafter.head.forward(hidden, batch, self._context.caches)
