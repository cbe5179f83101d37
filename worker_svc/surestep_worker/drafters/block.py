"""Drafting of whole windows in one pass of a draft head.

The pass reads the newest token, if it is to, and mask tokens behind it. Its rows lie in the KV
pages at the positions of the drafts, where the next step writes what is accepted of them: no row of
a block outlives it.
"""

from __future__ import annotations

import torch
from surestep_kernels.choose import RowStatus
from surestep_kernels.gather_tokens import TokenInputs, TokenRuns
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.slot_state import SlotState
from surestep_kernels.table import StepOps
from torch import Tensor

from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.layers.draft_head import BlockPass

from .base import Drafts
from .head import HeadDrafter, HeadSteps
from .inputs import DraftShape, HeadInputs


class BlockDrafter(HeadDrafter):
    """A head that has a pass for whole windows."""

    def on_device(self, ops: StepOps, state: SlotState) -> BlockSteps:
        """Return what drafts, between the slots of a device and the ops of a step."""
        return BlockSteps(self, self._context, ops, state)


class BlockSteps(HeadSteps):
    """Drafts with the head of a BlockDrafter."""

    def _propose(
        self, slots: Tensor, max_drafts: Tensor, sent: HeadInputs, shape: DraftShape, error: Tensor
    ) -> Drafts:
        """Draft after what is caught up with, all tokens at once."""
        ids, count = self._no_ids(slots), shape.num_drafts
        if not count or (self._may_stop and not max_drafts.any()):
            return Drafts(ids, torch.zeros_like(max_drafts), torch.zeros_like(max_drafts))
        hidden = self._block(slots, max_drafts, count, error)
        column = torch.arange(count, dtype=torch.int32, device=slots.device)
        row = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        length = (self._state.known[slots].unsqueeze(1) + column).flatten()
        chosen, status = self._choose(hidden, row.repeat_interleave(count), length, sent, shape)
        status = status.view(-1, count)
        wanted = column < max_drafts.unsqueeze(1)
        sound = ((status == RowStatus.OK) & wanted).int().cumprod(dim=1, dtype=torch.int32)
        broken = wanted & (status == RowStatus.NON_FINITE)
        ids[:, :count] = chosen.view(-1, count) * sound
        counts = sound.sum(dim=1, dtype=torch.int32)
        return Drafts(ids, counts, broken.any(dim=1).int())

    def _block(self, slots: Tensor, max_drafts: Tensor, count: int, error: Tensor) -> Tensor:
        """Return the outputs [R * count, width] of the rows that draft."""
        block = self._drafter.head.block
        assert block is not None
        if block.anchored:
            valid = (max_drafts + 1) * (max_drafts > 0)
            out = self._pass(block, slots, valid, count + 1, error)
            return out.view(len(slots), count + 1, -1)[:, 1:].flatten(0, 1).contiguous()
        seed = self._seed[slots].unsqueeze(1)
        if count == 1:
            return seed.flatten(0, 1)
        out = self._pass(block, slots, (max_drafts - 1).clamp(min=0), count - 1, error)
        return torch.cat((seed, out.view(len(slots), count - 1, -1)), dim=1).flatten(0, 1)

    def _pass(
        self, block: BlockPass, slots: Tensor, valid: Tensor, width: int, error: Tensor
    ) -> Tensor:
        """Return the outputs [R * width, H] of blocks that begin at the newest token; of the rows
        of one, the first `valid` i32[R] count."""
        num_rows, start = len(slots), self._state.known[slots] - 1
        row = torch.arange(num_rows, dtype=torch.int32, device=slots.device)
        cu = torch.arange(num_rows + 1, dtype=torch.int32, device=slots.device) * width
        runs = TokenRuns(row.repeat_interleave(width), cu, slots, start, valid)
        kv = self._context.caches.kv
        tokens = self._ops.gather_tokens(
            runs,
            self._state,
            error,
            shift=0,
            block_size=kv.spec.block_size,
            num_blocks=kv.num_blocks,
        )
        ids = tokens.token_ids.view(num_rows, width)
        ids[:, int(block.anchored) :] = block.mask_id
        return block.run(self._batch(tokens, slots, start + valid - 1, width), self._context.caches)

    def _batch(self, tokens: TokenInputs, slots: Tensor, last: Tensor, width: int) -> StepBatch:
        """Return blocks of `width` rows; all of one see what is up to its position `last` i32[R],
        or up to their own. A row is one by itself to attention, for which all rows are causal."""
        one = torch.arange(len(slots) * width + 1, dtype=torch.int32, device=slots.device)
        slot, table = slots.repeat_interleave(width), self._state.block_tables[0]
        last, own = last.clamp(min=0).repeat_interleave(width), tokens.positions.int()
        rows = AttentionRows(table, slot, one, own, 1)
        whole = rows._replace(start=last, wider=(last - own).clamp(min=0))
        pages = (GroupPages(seen, tokens.kv_slots[0]) for seen in (whole, rows))
        none = torch.zeros(0, dtype=torch.int64, device=slots.device)
        return StepBatch(tokens.token_ids, tokens.positions, tuple(pages), hidden_index=none)
