"""Drafting with the model's own multi-token prediction head, used again for every further draft.

The head's row for position i takes the model's hidden state at i and token i + 1. Hidden states of
all positions lie in the KV pages, so positions that were never drafted from can be caught up with
at any time. Rows of drafts themselves are written too, from the head's own output, and overwritten
when the next step catches up with what was accepted.
"""

from __future__ import annotations

import numpy as np
import torch
from surestep_kernels.paged_attention import AttentionRows
from surestep_proto import engine_pb2 as pb

from surestep_worker.batch import StepBatch
from surestep_worker.models.mtp import MtpHead
from surestep_worker.plan import BoolArray, IntArray
from surestep_worker.sampling import sample

from .base import Drafts, Target
from .temperature import DraftTemperature, FloatArray


class MtpDrafter:
    """See StatefulDrafter."""

    def __init__(self, num_drafts: int, target: Target, temperature: DraftTemperature) -> None:
        assert target.model.mtp is not None, "the model was loaded without its MTP head"
        self.head: MtpHead = target.model.mtp
        self._num_drafts = num_drafts
        self._target = target
        self._temperature = temperature
        width = target.model.config.hidden_size
        # Output of the head for the newest committed position of each slot.
        self._seed = torch.zeros(target.slots.num_slots, width, dtype=target.caches.kv.spec.dtype)

    def catch_up(self, slots: IntArray, start: IntArray, count: IntArray) -> None:
        """See StatefulDrafter."""
        cu = np.concatenate(([0], np.cumsum(count)))
        row = np.repeat(np.arange(len(slots)), count)
        position = start[row] + np.arange(cu[-1]) - cu[row]
        batch = self._batch(slots, start, cu, row, position)
        hidden = self._target.caches.kv.hidden[batch.kv_slots]
        out = self._run(batch, hidden)
        self._seed[torch.from_numpy(slots)] = out[torch.from_numpy(cu[1:] - 1)]

    def propose(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        k_caps: torch.Tensor,
    ) -> Drafts:
        """See Drafter. Rows get all drafts they may have, fewer only where logits are unusable."""
        host, places, caps = slots.numpy(), lengths.numpy(), k_caps.numpy()
        ids = np.zeros((len(host), self._num_drafts), dtype=np.int64)
        counts = np.zeros(len(host), dtype=np.int64)
        non_finite = np.zeros(len(host), dtype=np.bool_)
        factors = torch.from_numpy(self.factors(host))
        rows, hidden = np.arange(len(host)), self._seed[slots]
        for step in range(self._num_drafts):
            rows, hidden = _keep(caps[rows] > step, rows, hidden)
            if not len(rows):
                break
            slot, place = host[rows], places[rows] + step
            chosen, status = self._choose(hidden, slot, place, factors[rows], tokens)
            usable = status == pb.OK
            non_finite[rows] = status == pb.NON_FINITE
            self._target.slots.write_token(slot, place, chosen)
            ids[rows, step] = chosen
            counts[rows] += usable
            rows, hidden = _keep(usable, rows, hidden)
            if step + 1 < self._num_drafts and len(rows):
                hidden = self._next(host[rows], places[rows] + step, hidden)
        return Drafts(*map(torch.from_numpy, (ids, counts, non_finite)))

    def _choose(
        self,
        hidden: torch.Tensor,
        slot: IntArray,
        place: IntArray,
        factors: torch.Tensor,
        tokens: torch.Tensor,
    ) -> tuple[IntArray, IntArray]:
        """Drafts for an index of each slot [R], and a RowStatus each; rank 0 chooses for all."""
        target = self._target
        logits = target.model.logits(hidden).div_(factors.unsqueeze(1))
        where = torch.from_numpy(slot), torch.from_numpy(place)
        chosen = sample(logits, *where, tokens, target.sampling)
        packed = target.tp.broadcast(torch.stack((chosen.ids, chosen.status.long()))).numpy()
        return packed[0], packed[1]

    def observe(self, slots: IntArray, n_drafts: IntArray, n_accepted: IntArray) -> None:
        """See StatefulDrafter."""
        random = self._random(slots)
        if random.any():
            self._temperature.observe(slots[random], n_drafts[random], n_accepted[random])

    def factors(self, slots: IntArray) -> FloatArray:
        """Divisors [R] of the logits; greedy requests have no use for any."""
        factors = np.ones(len(slots), dtype=np.float32)
        random = self._random(slots)
        if random.any():
            factors[random] = self._temperature.choose(slots[random])
        return factors

    def _random(self, slots: IntArray) -> BoolArray:
        """Which of slots [R] sample at a temperature above zero."""
        active: BoolArray = self._target.sampling.draws.active[torch.from_numpy(slots)].numpy()
        return active

    def _next(self, slots: IntArray, place: IntArray, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output [R, H] behind a draft at index `place`, from its output before it."""
        cu = np.arange(len(slots) + 1)
        batch = self._batch(slots, place - 1, cu, cu[:-1], place - 1)
        return self._run(batch, hidden)

    def _run(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
        target = self._target
        embedded = target.model.embed(batch.token_ids)
        return self.head.forward(embedded, hidden, batch, target.caches)

    def _batch(
        self, slots: IntArray, start: IntArray, cu: IntArray, row: IntArray, position: IntArray
    ) -> StepBatch:
        """Positions [T] of rows [R], each with the token behind it."""
        table, size = self._target.slots, self._target.slots.block_size
        blocks = table.block_tables[slots[row], position // size].astype(np.int64)
        return StepBatch(
            token_ids=torch.from_numpy(table.ids_at(slots[row], position + 1)),
            positions=torch.from_numpy(position),
            rows=AttentionRows(
                torch.from_numpy(table.block_tables),
                torch.from_numpy(slots),
                torch.from_numpy(cu.astype(np.int32)),
                torch.from_numpy(start.astype(np.int32)),
                max_tokens=int(np.diff(cu).max()),
            ),
            kv_slots=torch.from_numpy(blocks * size + position % size),
            hidden_index=torch.zeros(0, dtype=torch.int64),
        )


def _keep(wanted: BoolArray, rows: IntArray, hidden: torch.Tensor) -> tuple[IntArray, torch.Tensor]:
    """The wanted ones of rows [R] and of hidden [R, H]; nothing is copied when all are."""
    if wanted.all():
        return rows, hidden
    return rows[wanted], hidden[torch.from_numpy(wanted)]
