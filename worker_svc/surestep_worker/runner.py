"""Executes step plans on one rank: apply, draft, gather, forward, choose, commit, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from surestep_common.errors import InternalError, InvalidRequest
from surestep_proto import engine_pb2 as pb

from .gather import Gathered, gather
from .kv_cache import KVCache
from .models import Model
from .plan import IntArray, Rows, read_rows
from .plan_check import check_rows
from .result import StepOutcome, build_result
from .sampling import SamplingSlots, Verdict, sample, verify
from .slots import Slots
from .spec import Drafter, Drafts
from .tp import TensorParallel


class Parts(NamedTuple):
    """What a runner is made of; each part is used for what its name says and nothing else."""

    model: Model
    kv: KVCache
    slots: Slots
    sampling: SamplingSlots
    drafter: Drafter | None
    max_draft_tokens: int
    tp: TensorParallel
    device: torch.device


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
        self._parts = parts
        self._slots = parts.slots
        self._epoch = 0
        self._step = 0

    def open(self, epoch: int) -> None:
        """Begin an epoch: every slot is emptied. Raises InvalidRequest for an old epoch."""
        if epoch <= self._epoch:
            raise InvalidRequest(f"epoch {epoch} is not newer than {self._epoch}", param="epoch")
        self._epoch, self._step = epoch, 0
        self._slots.reset()
        self._parts.sampling.reset()

    @torch.inference_mode()
    def step(self, plan: pb.StepPlan) -> pb.StepResult:
        """Execute one plan. Raises LedgerError or InvalidRequest; the epoch is then over."""
        clock = StepClock()
        rows = self._apply(plan)
        drafts = self._draft(rows)
        gathered = gather(rows, drafts.counts, self._slots, self._parts.device)
        clock.prepare_us = clock.lap()
        hidden = self._forward(rows, gathered)
        logits = self._logits(hidden, gathered)
        clock.forward_us = clock.lap()
        verdict = self._choose(gathered, drafts, logits)
        outcome = self._commit(rows, gathered, drafts, verdict)
        result = build_result(self._parts, plan, rows, gathered, outcome, hidden, logits)
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
        for slot, tenancy in zip(plan.freed_slots, plan.freed_slot_epochs, strict=True):
            self._slots.free(slot, tenancy)
            self._parts.sampling.free(slot)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._parts.sampling.admit(admission.slot, admission.sampling, admission.prompt_len)
        self._extend(plan)
        rows = read_rows(plan)
        check_rows(rows, self._slots, self._parts.max_draft_tokens)
        self._step = plan.step
        return rows

    def _extend(self, plan: pb.StepPlan) -> None:
        block_ids = np.array(plan.block_ids, dtype=np.int64)
        if len(block_ids) and not 0 < block_ids.min() <= block_ids.max() < self._parts.kv.num_blocks:
            raise InternalError("plan names a block outside the pool")
        ends = np.cumsum(np.array(plan.extend_counts, dtype=np.int64))
        for slot, count, end in zip(plan.extend_slots, plan.extend_counts, ends, strict=True):
            self._slots.extend(slot, block_ids[end - count : end])

    def _draft(self, rows: Rows) -> Drafts:
        """Drafts of every VERIFY row [R, K]; rank 0 proposes, so that all ranks hold the same."""
        ids = np.zeros((len(rows), self._parts.max_draft_tokens), dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        verify_rows = np.flatnonzero(rows.mode == pb.VERIFY)
        if self._parts.drafter is None or not len(verify_rows):
            return Drafts(ids, counts)
        slot = rows.slot[verify_rows]
        packed = np.zeros((len(slot), ids.shape[1] + 1), dtype=np.int64)
        if self._parts.tp.rank == 0:
            proposed = self._parts.drafter.propose(
                self._slots.tokens, slot, self._slots.known[slot], rows.k_cap[verify_rows]
            )
            packed[:, : proposed.ids.shape[1]] = proposed.ids
            packed[:, -1] = proposed.counts
        packed = self._broadcast(packed)
        ids[verify_rows], counts[verify_rows] = packed[:, :-1], packed[:, -1]
        self._slots.write_drafts(slot, ids[verify_rows], counts[verify_rows])
        return Drafts(ids, counts)

    def _forward(self, rows: Rows, gathered: Gathered) -> torch.Tensor:
        """Final hidden states [T, H]."""
        if not len(rows):
            return torch.empty(0, self._parts.model.config.hidden_size)
        return self._parts.model.forward(gathered.batch, self._parts.kv)

    def _logits(self, hidden: torch.Tensor, gathered: Gathered) -> torch.Tensor:
        """Logits [N, V] of the sampled positions."""
        if not len(gathered.windows.length):
            return torch.empty(0, self._parts.model.config.vocab_size)
        return self._parts.model.logits(hidden[gathered.batch.logits_index])

    def _choose(self, gathered: Gathered, drafts: Drafts, logits: torch.Tensor) -> Verdict:
        """Sample every position, accept drafts that equal the choice. Rank 0 decides for all."""
        windows = gathered.windows
        width = self._parts.max_draft_tokens + 1
        packed = np.zeros((len(windows.row), width + 3), dtype=np.int64)
        if self._parts.tp.rank == 0 and len(windows.row):
            sampled = sample(
                logits,
                torch.from_numpy(windows.position_slot),
                torch.from_numpy(windows.length),
                self._slots.tokens,
                self._parts.sampling,
            )
            verdict = verify(
                sampled,
                windows.cu,
                drafts.ids[windows.row],
                drafts.counts[windows.row],
                windows.slot,
                self._parts.sampling,
            )
            packed[:, :width] = verdict.tokens
            packed[:, width] = verdict.n_accepted
            packed[:, width + 1] = verdict.n_emitted
            packed[:, width + 2] = verdict.status
        packed = self._broadcast(packed)
        return Verdict(packed[:, :width], *(packed[:, width + i] for i in range(3)))

    def _commit(
        self, rows: Rows, gathered: Gathered, drafts: Drafts, verdict: Verdict
    ) -> StepOutcome:
        """State advances by what was emitted, never by what was hoped for."""
        windows = gathered.windows
        outcome = StepOutcome.nothing_chosen(
            len_before=self._slots.committed[rows.slot], n_drafts=drafts.counts, verdict=verdict
        )
        outcome.status[windows.row] = verdict.status
        outcome.n_accepted[windows.row] = verdict.n_accepted
        outcome.n_emitted[windows.row] = verdict.n_emitted
        consumed: IntArray = np.where(rows.is_prefill, gathered.consumed, outcome.n_emitted)
        consumed[outcome.status != pb.OK] = 0  # a failed row advances nothing
        self._slots.append(windows.slot, verdict.tokens, verdict.n_emitted)
        self._slots.commit(
            self._step, rows.slot, consumed, outcome.n_accepted, outcome.n_emitted
        )
        return outcome

    def _broadcast(self, packed: IntArray) -> IntArray:
        """Rank 0's array on every rank; collectives run whenever the plan says so, on all ranks."""
        if self._parts.tp.size == 1:
            return packed
        array: IntArray = self._parts.tp.broadcast(torch.from_numpy(packed)).numpy()
        return array
