"""The real scheduler core and a real runner in one process, with results delayed as a wire would.

Plans are executed when they are sent and their results are applied `depth` plans later, which is
what a scheduler at that pipelining depth sees. Plans travel as serialised protos.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from support.parity.cases import canary
from surestep_common.errors import SurestepError
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.cache.tiers import Order
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Plan
from surestep_scheduler.core.poison import NonFiniteLogits
from surestep_scheduler.core.sequence import Finish, Output, Request, Sequence, TokenLogprobs
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.engine.wire import (
    from_proto,
    kept_by,
    tier_answer,
    tier_order,
    to_proto,
)
from surestep_scheduler.policy.schedule import schedule
from surestep_scheduler.policy.tiering import settle
from surestep_worker.step.runner import Runner
from surestep_worker.tiers.moves import Moves

_ANSWER_S = 30.0  # in which a tier must answer
# Executes a plan. Its results, one per rank, or a function that gets them when they are applied.
Results = list[pb.StepResult] | Callable[[], list[pb.StepResult]]
Step = Callable[[pb.StepPlan], Results]


@dataclass
class Answer:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    prompt_logprobs: TokenLogprobs | None = None
    pooled: bytes = b""
    finish: Finish | None = None
    error: SurestepError | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0


class LocalEngine:
    """Runs requests to their end. `after_apply` may abort or preempt between steps."""

    def __init__(
        self,
        step: Step,
        facts: pb.WorkerInfo,
        *,
        epoch: int = 1,
        depth: int = 1,
        max_num_batched_tokens: int = 64,
        enable_prefix_caching: bool = True,
        after_apply: Callable[[SchedulerState], None] = lambda state: None,
        shuffle: random.Random | None = None,
        reopen: Callable[[int], object] | None = None,
        moves: Moves | None = None,
    ) -> None:
        """`shuffle` puts the rows of every plan into random order and results off at random.

        `reopen` opens another epoch on the workers when one is lost to logits that are not finite.
        `moves` take the orders to the tiers of the rank, if it has any.
        """
        limits = Limits(
            num_slots=facts.num_slots,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            kv_windows=tuple(facts.kv_windows),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_draft_tokens=facts.max_draft_tokens,
            max_forced_drafts=facts.max_forced_drafts,
            grammar_fault=facts.grammar_fault,
            max_queue_len=1000,
            pipeline_depth=depth,
            drafter_has_state=facts.drafter_has_state,
            drafter_looks_up=facts.drafter_looks_up,
            drafter_recurrent=facts.drafter_recurrent,
            recurrent=facts.recurrent,
            num_snapshots=facts.num_snapshots,
            prompt_chunk=max(1, facts.prompt_chunk),
            snapshot_interval=facts.block_size,
            enable_prefix_caching=enable_prefix_caching,
            tiers=tuple(facts.tiers),
            headless=facts.headless,
        )
        self.state = SchedulerState(limits)
        self.state.open_epoch(epoch, limits)
        self._step, self._depth, self._after_apply = step, depth, after_apply
        self._shuffle, self._reopen = shuffle, reopen
        self._results: deque[Results] = deque()
        self._moves, self._moving = moves, dict[int, tuple[Order, Future[pb.TierAnswer]]]()
        self._answers: dict[str, Answer] = {}
        self._clock = 0.0
        if moves is not None:
            self.add(canary())

    def recover(self, facts: pb.WorkerInfo, steps: Callable[[int], Step]) -> None:
        """Go on with a successor of the workers, which has kept what its `facts` say."""
        state, self._results = self.state, deque()
        state.fence()
        kept = kept_by([facts], state.planner, state.epoch)
        state.open_epoch(state.epoch + 1, state.limits, kept)
        self._step = steps(state.epoch)

    def run(self, requests: Iterable[Request], arrive_every: int = 0) -> dict[str, Answer]:
        """Serve all requests; one arrives every `arrive_every` steps (0 = all at once)."""
        waiting = deque(requests)
        num_steps = 0
        while waiting or self.state.open or self._results or self._moving:
            while waiting and (not arrive_every or num_steps % arrive_every == 0):
                self.add(waiting.popleft())
                if arrive_every:
                    break
            self.advance()
            num_steps += 1
            self.state.check()
        while self._moves is not None:  # what has come to rest is stored
            assert schedule(self.state, self._clock) is None
            self._order()
            if not self._moving:
                break
            self._settle(wait=True)
        return self._answers

    def add(self, request: Request) -> Sequence:
        """Queue one request."""
        self._clock += 1e-3
        self._answers[request.id] = Answer()
        return self.state.add(request, self._clock)

    def advance(self) -> None:
        """Send plans up to the depth, then apply the oldest result."""
        depth = self._depth if self._shuffle is None else self._shuffle.randint(0, self._depth)
        while len(self._results) <= depth:
            plan = schedule(self.state, self._clock)
            self._order()
            if plan is None:
                break
            if self._shuffle is not None:
                _reorder(plan, self._shuffle.sample(range(len(plan.rows)), k=len(plan.rows)))
            wire = to_proto(plan, budget_ms=1000).SerializeToString()
            self._results.append(self._step(pb.StepPlan.FromString(wire)))
        if self._results:
            results = self._results.popleft()
            self._apply(results() if callable(results) else results)
            self._after_apply(self.state)
        self._settle(wait=not self._results)

    def _order(self) -> None:
        for order in self.state.tiers.take_unsent():
            assert self._moves is not None
            wire = tier_order(order, self.state.epoch, self.state.limits.block_size)
            told = self._moves.submit(pb.TierOrder.FromString(wire.SerializeToString()))
            self._moving[order.number] = order, told

    def _settle(self, *, wait: bool) -> None:
        """Apply answers of the tiers that are there; `wait` for one if nothing else can happen."""
        if wait and self._moving:
            futures.wait(
                [told for _, told in self._moving.values()], _ANSWER_S, futures.FIRST_COMPLETED
            )
        for number, (order, told) in list(self._moving.items()):
            if told.done():
                del self._moving[number]
                settle(self.state, tier_answer(order, [told.result()]))

    def _apply(self, results: list[pb.StepResult]) -> None:
        try:
            for output in commit_result(self.state, from_proto(results)):
                self._note(output)
        except NonFiniteLogits:
            if self._reopen is None:
                raise
            self._results.clear()
            self.state.fence()
            self.state.open_epoch(self.state.epoch + 1, self.state.limits)
            self._reopen(self.state.epoch)

    def _note(self, output: Output) -> None:
        answer = self._answers[output.seq.request.id]
        answer.token_ids += output.token_ids
        if output.logprobs is not None:
            answer.logprobs.extend(output.logprobs)
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = output.prompt_logprobs
        answer.pooled += output.pooled
        answer.finish, answer.error = output.finish, output.error
        seq = output.seq
        answer.num_drafts, answer.num_accepted = seq.num_drafts, seq.num_accepted
        answer.num_preemptions = seq.num_preemptions


def _reorder(plan: Plan, order: list[int]) -> None:
    """Put the rows of a plan into another order, in place."""
    columns = [column for _, column in plan.rows.columns()]
    for column in (plan.tenancies, plan.width, *columns):
        column[:] = column[order]
    for derived in ("is_prefill", "is_sampled"):  # kept since they were computed
        plan.rows.__dict__.pop(derived, None)
    plan.snapshot_requests.row[:] = np.argsort(order)[plan.snapshot_requests.row]


def one_rank(runner: Runner, epoch: int = 1) -> Step:
    """Steps of a single rank, its epoch opened."""
    runner.open(epoch)
    return lambda plan: [runner.step(plan)]


def one_rank_behind(runner: Runner, epoch: int = 1) -> Step:
    """The same, but a step is finished when its results are applied: later ones run already."""
    runner.open(epoch)

    def step(plan: pb.StepPlan) -> Results:
        pending = runner.launch(plan)
        return lambda: [pending.finish()]

    return step
