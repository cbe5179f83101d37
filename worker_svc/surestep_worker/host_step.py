"""Steps whose state lives on the host: draft, gather, forward, choose, commit, report."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from surestep_proto import engine_pb2 as pb

from .digest import fingerprint
from .drafting import Drafting
from .gather import Gathered, PooledTokens, gather, offsets, tokens_consumed
from .parts import Parts
from .pending import Done
from .plan import IntArray, Rows, read_snapshots
from .result import (
    StepOutcome,
    digest,
    fill_logprobs,
    fill_rows,
    fill_vectors,
    judge_vectors,
)
from .sampling import Verdict, sample, verify
from .spec import Drafts
from .state_rows import StateRows, state_rows


@dataclass
class StepClock:
    """Microseconds of each phase of a step."""

    draft_us: int = 0
    prepare_us: int = 0  # drafting included
    forward_us: int = 0
    sample_us: int = 0

    def __post_init__(self) -> None:
        self._last = time.perf_counter_ns()

    def lap(self) -> int:
        """Microseconds since the previous lap."""
        now = time.perf_counter_ns()
        elapsed, self._last = (now - self._last) // 1000, now
        return elapsed


class HostStep:
    """See Execution. Every step is over when `launch` returns."""

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

    def prepare(self) -> None:
        """Nothing has to be. See Execution."""

    def open(self) -> None:
        """See Execution."""
        self._drafting.open()

    def launch(self, plan: pb.StepPlan, rows: Rows) -> Done:
        """See Execution."""
        clock = StepClock()
        self.parts.heartbeat.enter(pb.DRAFTING)
        drafted = self._drafting.run(rows, plan.drafter_faults)
        drafts = drafted.drafts
        clock.draft_us = clock.lap()
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
        clock.prepare_us = clock.draft_us + clock.lap()
        hidden = self._forward(gathered)
        scored = hidden[: len(hidden) - len(gathered.pooled.token)]
        logits = self.parts.model.logits(scored).float() if len(scored) else scored
        vectors = self._pool(gathered.pooled, hidden[len(scored) :])
        clock.forward_us = clock.lap()
        self.parts.heartbeat.enter(pb.SAMPLING)
        verdict = self._choose(gathered, drafts, logits)
        outcome = self._commit(plan.step, rows, gathered, drafts, verdict, vectors, state)
        result = self._report(plan, rows, gathered, outcome, verdict, hidden, logits)
        recurrent = self.parts.caches.recurrent
        if recurrent is not None and state is not None:
            recurrent.taken(state.snapshot_ids, state.snapshot_lens)
            result.snapshot_ids_taken.extend(state.snapshot_ids.tolist())
        if self.parts.tp.rank == 0:
            fill_vectors(result, outcome, gathered.pooled, vectors)
        result.drafter_faults = self._drafting.faults
        result.drafter_skipped = drafted.skipped
        result.draft_non_finite_rows.extend(drafted.non_finite_rows.tolist())
        clock.sample_us = clock.lap()
        result.timings.prepare_us = clock.prepare_us
        result.timings.draft_us = clock.draft_us
        result.timings.forward_us = clock.forward_us
        result.timings.sample_us = clock.sample_us
        return Done(result)

    def _state_rows(self, plan: pb.StepPlan, rows: Rows, drafts: Drafts) -> StateRows | None:
        recurrent = self.parts.caches.recurrent
        if recurrent is None:
            return None
        armed = read_snapshots(plan, recurrent.num_snapshots)
        consumed = tokens_consumed(rows, drafts.counts.numpy())
        return state_rows(rows, consumed, offsets(consumed), self._slots, armed)

    def _forward(self, gathered: Gathered) -> torch.Tensor:
        """Final hidden states [N, H] of the positions that are scored, then of those pooled."""
        batch = gathered.batch
        if not len(batch.token_ids):  # the plan only frees slots
            return torch.empty(0, 0)
        caches = self.parts.caches
        hidden = self.parts.model.forward(batch, caches)
        if caches.kv.spec.hidden_size:  # what a drafter with state will draft from
            caches.kv.hidden[batch.kv_slots] = hidden
        return hidden[batch.hidden_index]

    def _pool(self, pooled: PooledTokens, hidden: torch.Tensor) -> torch.Tensor:
        """Vectors [K, H], on the host, of the rows that complete one; all ranks have the same."""
        if not len(pooled.token):
            return torch.empty(0, 0)
        columns = pooled.slot, pooled.row_slot, pooled.num_tokens
        slot, row_slot, num_tokens = (torch.from_numpy(c).to(hidden.device) for c in columns)
        self.parts.pooling.add(slot, hidden)
        return self.parts.pooling.mean(row_slot, num_tokens).cpu()

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
        step: int,
        rows: Rows,
        gathered: Gathered,
        drafts: Drafts,
        verdict: Verdict,
        vectors: torch.Tensor,
        state: StateRows | None,
    ) -> StepOutcome:
        """State advances by what was emitted, never by what was hoped for."""
        windows = gathered.windows
        outcome = StepOutcome.nothing_chosen(
            len_before=self._slots.committed[rows.slot], n_drafts=drafts.counts.numpy()
        )
        outcome.status[windows.row] = verdict.status.numpy()
        judge_vectors(outcome, gathered.pooled, vectors)
        outcome.n_accepted[windows.row] = verdict.n_accepted.numpy()
        outcome.n_emitted[windows.row] = verdict.n_emitted.numpy()
        consumed: IntArray = np.where(rows.is_prefill, gathered.consumed, outcome.n_emitted)
        consumed[outcome.status != pb.OK] = 0  # a failed row advances nothing
        self._slots.append(windows.slot, verdict.tokens.numpy(), verdict.n_emitted.numpy())
        folded = outcome.len_before if state is None else state.folded
        counts = consumed, outcome.n_accepted, outcome.n_emitted
        self._slots.commit(step, rows.slot, folded, *counts)
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
        committed = self._slots.committed[rows.slot]
        result.digest = digest(outcome, verdict, committed, fingerprint(hidden))
        if tp.rank == 0:
            fill_rows(result, rows, outcome, verdict)
            result.draft_upto.extend(self._slots.draft_upto[rows.slot].tolist())
            fill_logprobs(result, gathered, verdict, logits, self.parts.sampling.logprobs)
        return result
