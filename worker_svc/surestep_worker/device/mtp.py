"""The MTP head on a device: see surestep_worker.spec.mtp for what it does.

It catches up with and drafts for all rows that it is given: what a row may not do is padding.
Penalties, biases and words that a request forbids do not shape its drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from surestep_kernels.choose import DrawParams, RowStatus
from surestep_kernels.gather_tokens import TokenInputs, TokenRuns
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.slot_state import SlotState
from surestep_kernels.step_ops import StepOps
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.parts import Parts
from surestep_worker.plan import IntArray
from surestep_worker.spec import Drafts
from surestep_worker.spec.mtp import MtpDrafter

from .positions import offsets


class DraftShape(NamedTuple):
    """What decides which kernels draft. None of them runs when both numbers are 0."""

    num_drafts: int  # most of any row
    max_catch_up: int  # most positions of any row by which the drafter's state follows
    random: bool  # some row draws its drafts
    truncated: bool  # and restricts what it draws from


class MtpInputs(NamedTuple):
    """What the host sends for R rows that catch up with at most C positions together."""

    token_row: Tensor  # i32[C]
    cu_rows: Tensor  # i32[R+1]
    draw: DrawParams  # of each row
    factors: Tensor  # f32[R] divisors of the logits


class DraftInputs(NamedTuple):
    """What the host sends a drafter for R rows."""

    slot: Tensor  # i32[R]
    k_cap: Tensor  # i32[R] most drafts
    catch_up: Tensor  # i32[R] positions that the drafter's state follows by, at most
    mtp: MtpInputs | None


class DeviceMtp:
    """Drafts with the head of an MtpDrafter."""

    def __init__(self, drafter: MtpDrafter, parts: Parts, ops: StepOps, state: SlotState) -> None:
        self._drafter, self._parts, self._ops, self._state = drafter, parts, ops, state
        width = parts.model.config.hidden_size
        dtype = parts.caches.kv.spec.dtype
        # Output of the head for the newest committed position of each slot.
        self._seed = torch.zeros(len(state.known), width, dtype=dtype, device=parts.device)

    def inputs(self, slot: IntArray, k_cap: IntArray, room: IntArray, draw: DrawParams) -> Any:
        """MtpInputs of arrays for rows [R] with `room` to catch up."""
        factors: Any = np.ones(len(slot), dtype=np.float32)
        null_slot = len(self._state.known) - 1
        drafts = np.flatnonzero((k_cap > 0) & (slot < null_slot))
        factors[drafts] = self._drafter.factors(slot[drafts])
        cu: Any = offsets(room).astype(np.int32)
        token_row: Any = np.repeat(np.arange(len(room), dtype=np.int32), room)
        return MtpInputs(token_row, cu, draw, factors)

    def draft(self, rows: DraftInputs, sent: MtpInputs, shape: DraftShape, error: Tensor) -> Drafts:
        """Catch up with what is committed, then draft. All columns are i32."""
        slots, k_cap = rows.slot.long(), rows.k_cap
        if shape.max_catch_up:
            self._catch_up(slots, rows.catch_up, sent, shape.max_catch_up, error)
        ids = torch.zeros(
            len(slots), self._parts.max_draft_tokens, dtype=torch.int32, device=slots.device
        )
        counts, non_finite = torch.zeros_like(k_cap), torch.zeros_like(k_cap)
        hidden, known = self._seed[slots], self._state.known[slots]
        going = torch.ones_like(k_cap)
        for step in range(shape.num_drafts):
            going = going * (k_cap > step)
            chosen, status = self._choose(hidden, known + step, sent, shape)
            non_finite |= going * (status == RowStatus.NON_FINITE)
            going = going * (status == RowStatus.OK)
            ids[:, step] = chosen * going
            counts += going
            self._write(slots, known + step, chosen, going)
            if step + 1 < shape.num_drafts:
                hidden = self._next(slots, known + step - 1, going, hidden, error)
        return Drafts(ids, counts, non_finite)

    def _catch_up(
        self,
        slots: Tensor,
        catch_up: Tensor,
        sent: MtpInputs,
        max_tokens: int,
        error: Tensor,
    ) -> None:
        state, kept = self._state, self._parts.caches.kv.hidden
        upto = state.draft_upto[slots]
        valid = torch.minimum(catch_up, state.committed[slots] - upto)
        runs = TokenRuns(sent.token_row, sent.cu_rows, slots, upto, valid)
        tokens = self._gather(runs, error)
        out = self._head(runs, tokens, kept[tokens.kv_slots], max_tokens)
        last = (sent.cu_rows[:-1] + valid - 1).clamp(min=0).long()
        moved = (valid > 0).unsqueeze(1)
        self._seed[slots] = torch.where(moved, out[last], self._seed[slots])

    def _choose(
        self, hidden: Tensor, length: Tensor, sent: MtpInputs, shape: DraftShape
    ) -> tuple[Tensor, Tensor]:
        """Ids and status i32[R]; rank 0 chooses for all."""
        logits = self._parts.model.logits(hidden).float() / sent.factors.unsqueeze(1)
        row = torch.arange(len(length), dtype=torch.int32, device=length.device)
        chosen = self._ops.choose(
            logits, row, length, sent.draw, random=shape.random, truncated=shape.truncated
        )
        ids, status = (self._parts.tp.broadcast(column) for column in chosen)
        return ids, status

    def _write(self, slots: Tensor, place: Tensor, ids: Tensor, wanted: Tensor) -> None:
        """Draft ids of the wanted rows go where the head looks for them."""
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
        """The head's output [R, H] at positions [R], behind each of which stands a draft."""
        row = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        runs = TokenRuns(row[:-1], row, slots, position, wanted)
        return self._head(runs, self._gather(runs, error), hidden, max_tokens=1)

    def _gather(self, runs: TokenRuns, error: Tensor) -> TokenInputs:
        """Positions, each with the token behind it."""
        kv = self._parts.caches.kv
        return self._ops.gather_tokens(
            runs,
            self._state,
            error,
            shift=1,
            block_size=kv.spec.block_size,
            num_blocks=kv.num_blocks,
        )

    def _head(
        self, runs: TokenRuns, tokens: TokenInputs, hidden: Tensor, max_tokens: int
    ) -> Tensor:
        rows = AttentionRows(
            self._state.block_tables, runs.slots, runs.cu_rows, runs.start, max_tokens
        )
        none = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        batch = StepBatch(*tokens[:2], rows=rows, kv_slots=tokens.kv_slots, hidden_index=none)
        embedded = self._parts.model.embed(tokens.token_ids)
        return self._drafter.head.forward(embedded, hidden, batch, self._parts.caches)
