"""A step on a device: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels.choose import Chosen
from surestep_kernels.gather_step import StepInputs
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.recurrent import RecurrentRows
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.slot_state import DraftIds, StepRows
from surestep_kernels.step_ops import StepOps
from surestep_kernels.write_runs import Runs
from surestep_proto import engine_pb2 as pb
from torch import Tensor

from surestep_worker.batch import StepBatch
from surestep_worker.digest import row_fingerprints
from surestep_worker.parts import Parts
from surestep_worker.plan import ArmedSnapshots, Rows, read_snapshots
from surestep_worker.spec import StatefulDrafter

from .download import Words
from .drafting import DeviceDrafting
from .geometry import Geometry
from .logprobs import LogprobPlan, ScoredPositions, score_positions
from .memory import SlotMemory
from .pending import DevicePending, Launched
from .upload import upload
from .wishes import WishBook, Wishes


class _Sampling(NamedTuple):
    """What is sampled: N positions, behind whose logits stand those of P prompt tokens."""

    logits_index: Tensor  # i32[N + P] into the step's tokens
    position_window: Tensor  # i32[N]


class _Columns(NamedTuple):
    """All that a step needs from the host."""

    rows: StepRows
    sampling: _Sampling
    wishes: Wishes
    scored: ScoredPositions | None
    differences: Runs | None  # of the slots, to be applied first


class DeviceStep:
    """See Execution. `launch` returns when everything is queued on the device."""

    def __init__(self, parts: Parts, ops: StepOps) -> None:
        """Raises InvalidRequest for a drafter that steps on a device cannot use."""
        if isinstance(parts.drafter, StatefulDrafter):
            raise InvalidRequest(
                "drafters with state run on the CPU only", param="speculative_config"
            )
        self.parts = parts
        self._ops = ops
        self._memory = SlotMemory(parts.slots, parts.device)
        self._wishes = WishBook(parts.slots.num_slots, parts.model.config.vocab_size)
        self._drafting = DeviceDrafting(
            parts.drafter,
            max_drafts=parts.max_draft_tokens,
            vocab_size=parts.model.config.vocab_size,
            device=parts.device,
        )

    def open(self) -> None:
        """See Execution."""
        self._drafting.faults = 0

    def launch(self, plan: pb.StepPlan, rows: Rows) -> DevicePending:
        """See Execution."""
        began, parts = time.perf_counter_ns(), self.parts
        for admission in plan.admissions:
            self._wishes.admit(admission)
        armed, wants = self._armed(plan), parts.sampling.logprobs
        geometry = Geometry.of(rows, parts.slots, wants.prompt.numpy(), armed)
        window_slot = rows.slot[geometry.window_row]
        logprobs = LogprobPlan.of(geometry, window_slot, wants)
        host = _Columns(
            rows=geometry.rows,
            sampling=_Sampling(geometry.logits_index, geometry.position_window),
            wishes=self._wishes.of(window_slot, geometry.position_window),
            scored=logprobs.positions if logprobs is not None else None,
            differences=self._memory.differences(plan),
        )
        sent = upload(host, parts.device)
        if sent.differences is not None:
            self._ops.write_runs(self._memory.words, sent.differences)
        parts.heartbeat.enter(pb.DRAFTING)
        state = self._memory.state
        drafted = self._drafting.run(rows, sent.rows.slot, state, plan.drafter_faults)
        parts.heartbeat.enter(pb.FORWARD)
        words = self._run(sent, drafted.drafts, geometry, logprobs)
        launched = Launched(
            plan, rows, geometry, armed, logprobs, drafted.skipped, self._drafting.faults,
            began, time.perf_counter_ns(),
        )  # fmt: skip
        return DevicePending(parts, words, launched)

    def _armed(self, plan: pb.StepPlan) -> ArmedSnapshots:
        recurrent = self.parts.caches.recurrent
        return read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)

    def _run(
        self, sent: _Columns, drafts: DraftIds, geometry: Geometry, logprobs: LogprobPlan | None
    ) -> Words:
        """Gather, forward, choose, commit: launches alone, then the copy of what is reported."""
        parts, ops, state = self.parts, self._ops, self._memory.state
        error = torch.zeros(1, dtype=torch.int32, device=parts.device)
        kv = parts.caches.kv
        inputs = ops.gather_step(sent.rows, drafts, state, error, kv.spec.block_size, kv.num_blocks)
        hidden = self._forward(sent, inputs, int(geometry.width.max(initial=0)))
        parts.heartbeat.enter(pb.SAMPLING)
        logits = parts.model.logits(hidden).float() if len(hidden) else hidden
        raw = logits.clone() if logprobs is not None else logits
        chosen = self._choose(sent, inputs, logits)
        report = ops.commit_step(sent.rows, drafts, chosen, sent.wishes.stops, state)
        scores = () if logprobs is None or sent.scored is None else score_positions(
            raw, chosen.ids, sent.scored, logprobs.width
        )  # fmt: skip
        told = report, error, _fingerprint(hidden, sent, drafts)
        return Words([*told, *scores])

    def _forward(self, sent: _Columns, inputs: StepInputs, max_tokens: int) -> Tensor:
        """Final hidden states [N + P, H] of the positions whose logits are wanted."""
        if not len(inputs.token_ids):  # the plan only frees slots
            return torch.empty(0, 1, device=self.parts.device)
        batch, caches = _batch(sent, inputs, max_tokens), self.parts.caches
        hidden = self.parts.model.forward(batch, caches)
        if caches.kv.spec.hidden_size:
            caches.kv.hidden[batch.kv_slots] = hidden
        return hidden[batch.logits_index]

    def _choose(self, sent: _Columns, inputs: StepInputs, logits: Tensor) -> Chosen:
        """Rank 0 decides for all."""
        wishes, tp = sent.wishes, self.parts.tp
        window, z = sent.sampling.position_window, logits[: len(inputs.lengths)]
        if not len(window):
            nothing = torch.zeros(0, dtype=torch.int32, device=logits.device)
            return Chosen(nothing, nothing)
        shaping = Shaping(wishes.biases, wishes.penalties, wishes.forbidden)
        if shaping != Shaping():
            slot = inputs.slots[sent.rows.position_row.long()].int()
            where = Positions(window, slot, inputs.lengths, self._memory.state.tokens)
            self._ops.shape_logits(z, where, shaping)
        chosen = self._ops.choose(
            z, window, inputs.lengths, wishes.draw, random=wishes.random, truncated=wishes.truncated
        )
        packed = tp.broadcast(torch.stack(chosen))
        return Chosen(packed[0], packed[1])


def _batch(sent: _Columns, inputs: StepInputs, max_tokens: int) -> StepBatch:
    rows = sent.rows
    return StepBatch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        rows=AttentionRows(inputs.block_tables, rows.cu_rows, inputs.start, max_tokens),
        kv_slots=inputs.kv_slots,
        logits_index=sent.sampling.logits_index.long(),
        recurrent=RecurrentRows(
            slots=inputs.slots,
            cu_rows=rows.cu_rows,
            start=inputs.start,
            pending=inputs.pending,
            window=1 - rows.advances,
            snapshot_after=inputs.snapshot_after,
            snapshot_line=rows.snapshot_line,
            max_tokens=max_tokens,
        ),
    )


def _fingerprint(hidden: Tensor, sent: _Columns, drafts: DraftIds) -> Tensor:
    """Of the hidden states [N + P, H] that are no padding: i64[1]."""
    rows, num_positions = sent.rows, len(sent.sampling.position_window)
    sums = row_fingerprints(hidden)
    real = rows.position_offset <= drafts.counts[rows.position_row.long()]
    windows = torch.where(real, sums[:num_positions], 0).sum()
    return (windows + sums[num_positions:].sum()).reshape(1)
