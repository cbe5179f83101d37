"""The scheduler core in front of workers that take their time: who waits for how long.

A step takes a constant and so much per token; results come one after the other, `depth` plans
behind. Tokens are invented: nothing here depends on which they are.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
from surestep_common.invariants import ResultRows
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Outcome, Plan, RankTimes
from surestep_scheduler.core.sequence import Request, Sequence
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.policy.schedule import schedule

VOCAB = 1000
_STEP_S, _TOKEN_S = 0.002, 0.0001


class PacedLoop:
    """`now` in seconds; `steps` counts results."""

    def __init__(self, *, depth: int = 1, seed: int = 0, **changes: Any) -> None:
        values: dict[str, Any] = {
            "num_slots": 16,
            "num_blocks": 4096,
            "block_size": 16,
            "max_model_len": 4096,
            "vocab_size": VOCAB,
            "max_num_batched_tokens": 512,
            "max_draft_tokens": 3,
            "max_queue_len": 4096,
            "pipeline_depth": depth,
        }
        limits = Limits(**(values | changes))
        self.state = SchedulerState(limits)
        self.state.open_epoch(1, limits)
        self.now = 0.0
        self.steps = 0
        self.tokens: dict[str, int] = {}  # emitted, by tenant
        self._in_flight: deque[tuple[Plan, float]] = deque()  # and when its result is there
        self._free_at = 0.0  # when the workers are through with all of it
        self._lengths: dict[int, int] = {}  # by slot
        self._rng = random.Random(seed)
        self._count = 0

    def add(self, tenant: str, length: int, max_tokens: int = 8, **wishes: Any) -> Sequence:
        """Queue a request whose prompt no other one has."""
        self._count += 1
        prompt = [self._count % VOCAB, self._count // VOCAB, *[1] * (length - 2)][:length]
        request = Request(
            id=f"{tenant}-{self._count}",
            prompt_ids=prompt,
            emitted_ids=[],
            max_tokens=max_tokens,
            tenant=tenant,
            cache_salt=str(self._count),
            **wishes,
        )
        return self.state.add(request, self.now)

    def add_like(self, request: Request, name: str) -> Sequence:
        """Queue a request that differs in its id alone."""
        return self.state.add(replace(request, id=name), self.now)

    def step(self) -> bool:
        """Plan as far ahead as the depth allows, then wait for a result; False: nothing to do."""
        while len(self._in_flight) <= self.state.limits.pipeline_depth:
            plan = schedule(self.state, self.now)
            if plan is None:
                break
            took = _STEP_S + _TOKEN_S * plan.num_step_tokens
            self._free_at = max(self._free_at, self.now) + took
            self._in_flight.append((plan, self._free_at))
        if not self._in_flight:
            return False
        plan, self.now = self._in_flight.popleft()
        self.steps += 1
        for output in commit_result(self.state, self._outcome(plan)):
            tenant = output.seq.request.tenant
            self.tokens[tenant] = self.tokens.get(tenant, 0) + len(output.token_ids)
        return True

    def steps_to_first_token(self, seq: Sequence) -> int:
        """Results from now until a request has a token."""
        began = self.steps
        while len(seq.tokens) == seq.prompt_len:
            assert self.step(), "it starves"
        return self.steps - began

    def lose_epoch(self) -> None:
        """The workers are lost and come back."""
        self._in_flight.clear()
        self._lengths.clear()
        self.state.fence()
        self.state.open_epoch(self.state.epoch + 1, self.state.limits)

    def _outcome(self, plan: Plan) -> Outcome:
        for tenancy in plan.admissions:
            self._lengths[tenancy.slot] = tenancy.num_cached
        rows, count = plan.rows, len(plan.rows)
        slots = rows.slot.tolist()
        before = np.array([self._lengths[slot] for slot in slots], dtype=np.int64)
        accepted = np.array([self._rng.randint(0, k) for k in rows.max_drafts.tolist()], np.int64)
        emitted = np.where(rows.mode == 1, 0, accepted + 1)  # PREFILL samples nothing
        after = before + np.where(rows.num_tokens > 0, rows.num_tokens, emitted)
        self._lengths.update(zip(slots, after.tolist(), strict=True))
        return Outcome(
            epoch=plan.epoch,
            step=plan.step,
            digests=[0],
            times=[RankTimes(0, 0, 0, 0, 0, 0)],
            slot=rows.slot,
            slot_epoch=rows.slot_epoch,
            rows=ResultRows(
                ok=np.ones(count, dtype=np.bool_),
                non_finite=np.zeros(count, dtype=np.bool_),
                len_before=before,
                n_drafts=rows.max_drafts,
                n_accepted=accepted,
                n_emitted=emitted,
                drafter_len=np.zeros(count, dtype=np.int64),
                n_forced=np.zeros(count, dtype=np.int64),
                n_looked_up=np.zeros(count, dtype=np.int64),
            ),
            token_ids=np.full(int(emitted.sum()), 7, dtype=np.uint32),
            snapshot_ids_taken=np.zeros(0, dtype=np.int64),
            drafter_faults=0,
            missed_kind=0,
            drafter_skipped=False,
            draft_non_finite_rows=[],
            logprobs={},
            prompt_logprobs={},
            pooled={},
            grammar_faults={},
        )
