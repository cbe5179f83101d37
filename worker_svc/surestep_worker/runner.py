"""Executes step plans on one rank: apply, draft, gather, forward, choose, commit, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from surestep_common.errors import InvalidRequest
from surestep_proto import engine_pb2 as pb

from .caches import Caches
from .drafting import Drafting
from .gather import Gathered, gather, offsets, tokens_consumed
from .heartbeat import Heartbeat
from .models import Model
from .plan import IntArray, Rows, read_rows, read_snapshots
from .plan_bounds import PlanBounds
from .plan_check import check_rows
from .result import StepOutcome, digest, fill_logprobs, fill_rows
from .sampling import SamplingSlots, Verdict, sample, verify
from .slots import Slots
from .spec import Drafter, Drafts
from .state_rows import StateRows, state_rows
from .tp import TensorParallel


class Parts(NamedTuple):
    """What a runner is made of; each part is used for what its name says and nothing else."""

    model: Model
    caches: Caches
    slots: Slots
    sampling: SamplingSlots
    drafter: Drafter | None
    max_draft_tokens: int
    tp: TensorParallel
    device: torch.device
    heartbeat: Heartbeat


@dataclass
class StepClock:
    """Microseconds of each phase of a step."""

    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0

    def __post_init__(self) -> None:
        self._last = time.perf_counter_ns()

    def lap(self) -> int:
        """Microseconds since the previous lap."""
        now = time.perf_counter_ns()
        elapsed, self._last = (now - self._last) // 1000, now
        return elapsed


class Runner:
    """One rank's executor. Not thread-safe: every call comes from the step thread."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._slots = parts.slots
        self._drafting = Drafting(
            parts.drafter,
            parts.slots,
            parts.tp,
            max_drafts=parts.max_draft_tokens,
            vocab_size=parts.model.config.vocab_size,
        )
        self._bounds = _bounds(parts)
        self._epoch = 0
        self._step = 0

    def open(self, epoch: int) -> None:
        """Begin an epoch: every slot is emptied. Raises InvalidRequest for an old epoch."""
        if epoch <= self._epoch:
            raise InvalidRequest(f"epoch {epoch} is not newer than {self._epoch}", param="epoch")
        self._epoch, self._step = epoch, 0
        self._slots.reset()
        self._drafting.open()
        if self.parts.caches.recurrent is not None:
            self.parts.caches.recurrent.forget()
        for slot in range(self._slots.num_slots):
            self.parts.sampling.free(slot)

    @torch.inference_mode()
    def step(self, plan: pb.StepPlan) -> pb.StepResult:
        """Execute one plan. Raises LedgerError or InvalidRequest; the epoch is then over."""
        clock = StepClock()
        rows = self._apply(plan)
        self.parts.heartbeat.enter(pb.DRAFTING)
        drafted = self._drafting.run(rows, plan.drafter_faults)
        drafts = drafted.drafts
        self.parts.heartbeat.enter(pb.FORWARD)
        state = self._state_rows(plan, rows, drafts)
        gathered = gather(
            rows,
            drafts.counts.numpy(),
            self._slots,
            self.parts.sampling.logprobs.prompt.numpy(),
            state.columns if state is not None else None,
            self.parts.device,
        )
        clock.prepare_us = clock.lap()
        hidden = self._forward(gathered)
        logits = self.parts.model.logits(hidden).float() if len(hidden) else hidden
        clock.forward_us = clock.lap()
        self.parts.heartbeat.enter(pb.SAMPLING)
        verdict = self._choose(gathered, drafts, logits)
        outcome = self._commit(rows, gathered, drafts, verdict, state)
        result = self._report(plan, rows, gathered, outcome, verdict, hidden, logits)
        recurrent = self.parts.caches.recurrent
        if recurrent is not None and state is not None:
            recurrent.taken(state.snapshot_ids, state.snapshot_lens)
            result.snapshot_ids_taken.extend(state.snapshot_ids.tolist())
        result.drafter_faults = self._drafting.faults
        result.drafter_skipped = drafted.skipped
        result.draft_non_finite_rows.extend(drafted.non_finite_rows.tolist())
        clock.sample_us = clock.lap()
        result.timings.prepare_us = clock.prepare_us
        result.timings.forward_us = clock.forward_us
        result.timings.sample_us = clock.sample_us
        return result

    def _apply(self, plan: pb.StepPlan) -> Rows:
        """Differences first, in the order the protocol fixes; then the rows are checked."""
        if plan.epoch != self._epoch or plan.step != self._step + 1:
            raise InvalidRequest(
                f"plan {plan.epoch}/{plan.step} does not follow {self._epoch}/{self._step}",
                param="step",
            )
        self._bounds.check(plan, self._slots.num_blocks.tolist())
        for slot, tenancy in zip(plan.freed_slots, plan.freed_slot_epochs, strict=True):
            self._slots.free(slot, tenancy)
            self.parts.sampling.free(slot)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._restore(admission)
            self.parts.sampling.admit(admission.slot, admission.sampling, admission.prompt_len)
        self._extend(plan)
        rows = read_rows(plan)
        check_rows(rows, self._slots, self.parts.max_draft_tokens)
        self._step = plan.step
        return rows

    def _restore(self, admission: pb.Admission) -> None:
        """Recurrent state behind a cached prefix comes from the snapshot of exactly its length."""
        recurrent = self.parts.caches.recurrent
        if recurrent is None or not admission.num_cached:
            return
        recurrent.restore(admission.snapshot_id, admission.slot, admission.num_cached)

    def _extend(self, plan: pb.StepPlan) -> None:
        block_ids = np.array(plan.block_ids, dtype=np.int64)
        ends = np.cumsum(np.array(plan.extend_counts, dtype=np.int64))
        for slot, count, end in zip(plan.extend_slots, plan.extend_counts, ends, strict=True):
            self._slots.extend(slot, block_ids[end - count : end])

    def _state_rows(self, plan: pb.StepPlan, rows: Rows, drafts: Drafts) -> StateRows | None:
        recurrent = self.parts.caches.recurrent
        if recurrent is None:
            return None
        armed = read_snapshots(plan, recurrent.num_snapshots)
        consumed = tokens_consumed(rows, drafts.counts.numpy())
        return state_rows(rows, consumed, offsets(consumed), self._slots, armed)

    def _forward(self, gathered: Gathered) -> torch.Tensor:
        """Final hidden states [N, H] of the positions whose logits are wanted."""
        batch = gathered.batch
        if not len(batch.token_ids):  # the plan only frees slots
            return torch.empty(0, 0)
        caches = self.parts.caches
        hidden = self.parts.model.forward(batch, caches)
        if caches.kv.spec.hidden_size:  # what a drafter with state will draft from
            caches.kv.hidden[batch.kv_slots] = hidden
        return hidden[batch.logits_index]

    def _choose(self, gathered: Gathered, drafts: Drafts, logits: torch.Tensor) -> Verdict:
        """Sample every position, accept drafts that equal the choice. Rank 0 decides for all."""
        windows = gathered.windows
        width = self.parts.max_draft_tokens + 1
        packed = torch.zeros(len(windows.row), width + 3, dtype=torch.int64)
        if self.parts.tp.rank == 0 and len(windows.row):
            verdict = self._judge(gathered, drafts, logits)
            packed[:, :width] = verdict.tokens
            packed[:, width:] = torch.stack(verdict[1:], dim=1)
        self.parts.tp.broadcast(packed)
        return Verdict(packed[:, :width], *packed[:, width:].unbind(dim=1))

    def _judge(self, gathered: Gathered, drafts: Drafts, logits: torch.Tensor) -> Verdict:
        windows, sampling = gathered.windows, self.parts.sampling
        sampled = sample(
            logits[: len(windows.length)],
            torch.from_numpy(windows.position_slot),
            torch.from_numpy(windows.length),
            self._slots.tokens,
            sampling,
        )
        return verify(
            sampled,
            torch.from_numpy(windows.cu),
            drafts.ids[windows.row],
            drafts.counts[windows.row],
            torch.from_numpy(windows.slot),
            sampling.stops,
        )

    def _commit(
        self,
        rows: Rows,
        gathered: Gathered,
        drafts: Drafts,
        verdict: Verdict,
        state: StateRows | None,
    ) -> StepOutcome:
        """State advances by what was emitted, never by what was hoped for."""
        windows = gathered.windows
        outcome = StepOutcome.nothing_chosen(
            len_before=self._slots.committed[rows.slot], n_drafts=drafts.counts.numpy()
        )
        outcome.status[windows.row] = verdict.status.numpy()
        outcome.n_accepted[windows.row] = verdict.n_accepted.numpy()
        outcome.n_emitted[windows.row] = verdict.n_emitted.numpy()
        consumed: IntArray = np.where(rows.is_prefill, gathered.consumed, outcome.n_emitted)
        consumed[outcome.status != pb.OK] = 0  # a failed row advances nothing
        self._slots.append(windows.slot, verdict.tokens.numpy(), verdict.n_emitted.numpy())
        folded = outcome.len_before if state is None else state.folded
        counts = consumed, outcome.n_accepted, outcome.n_emitted
        self._slots.commit(self._step, rows.slot, folded, *counts)
        self._drafting.observe(rows, outcome.n_drafts, outcome.n_accepted)
        return outcome

    def _report(
        self,
        plan: pb.StepPlan,
        rows: Rows,
        gathered: Gathered,
        outcome: StepOutcome,
        verdict: Verdict,
        hidden: torch.Tensor,
        logits: torch.Tensor,
    ) -> pb.StepResult:
        """Rank 0 tells everything, the other ranks only what proves that they agree."""
        tp = self.parts.tp
        result = pb.StepResult(epoch=plan.epoch, step=plan.step, rank=tp.rank)
        result.digest = digest(outcome, verdict, self._slots.committed[rows.slot], hidden)
        if tp.rank == 0:
            fill_rows(result, rows, outcome, verdict)
            result.draft_upto.extend(self._slots.draft_upto[rows.slot].tolist())
            fill_logprobs(result, gathered, verdict, logits, self.parts.sampling.logprobs)
        return result


def _bounds(parts: Parts) -> PlanBounds:
    slots, recurrent = parts.slots, parts.caches.recurrent
    return PlanBounds(
        num_slots=slots.num_slots,
        max_tokens=slots.tokens.shape[1],
        num_blocks=parts.caches.kv.num_blocks,
        max_blocks_per_slot=slots.block_tables.shape[1],
        vocab_size=parts.model.config.vocab_size,
        num_snapshots=recurrent.num_snapshots if recurrent is not None else 0,
    )
