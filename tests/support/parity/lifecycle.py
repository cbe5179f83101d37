"""A scheduler and a model worker through random lives of random requests.

Plans wait to be executed and results wait to be applied, so that every event happens with up to
three steps in flight. After every event all books are checked; at the end everything must drain and
each request must have exactly the tokens of a direct evaluation of the model.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.clients.vector_requests import POOLINGS, for_a_vector
from support.fakes.engine import FakeEngine
from support.fakes.model import FakeModel
from support.fakes.tiers import FakeTiers
from support.parity.cases import canary
from support.parity.reuse import check_reuse
from surestep_common.errors import ModelFault, QueueFull
from surestep_proto import worker_pb2 as pb
from surestep_proto.sampling_pb2 import NO_POOLING, SamplingParams
from surestep_scheduler.cache.tiers import Order
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.poison import CANARY, NonFiniteLogits
from surestep_scheduler.core.sequence import Finish, Output, Request, Sequence
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
from surestep_scheduler.speculation.draft_length import StepCosts
from surestep_scheduler.speculation.speculation import Alarm

MODEL = FakeModel(
    vocab_size=13,
    num_slots=4,
    num_blocks=16,
    block_size=3,
    max_model_len=40,
    max_step_tokens=24,
    max_draft_tokens=3,
)

KINDS = {
    "stateless": MODEL,
    "drafter": replace(MODEL, drafter_has_state=True),
    "lookups": replace(MODEL, drafter_has_state=True, drafter_looks_up=True),
    "lookups alone": replace(MODEL, drafter_looks_up=True),
    "recurrent": replace(MODEL, recurrent=True, num_snapshots=7),
    "both": replace(MODEL, drafter_has_state=True, recurrent=True, num_snapshots=3),
    "in chunks": replace(MODEL, recurrent=True, num_snapshots=5, prompt_chunk=4),
    "no snapshots": replace(MODEL, drafter_has_state=True, recurrent=True),
    "window": replace(MODEL, kv_windows=(0, 5), num_blocks=24),
    "windows alone": replace(MODEL, kv_windows=(1, 4, 7)),
    "window and states": replace(
        MODEL,
        kv_windows=(0, 8),
        drafter_has_state=True,
        recurrent=True,
        num_snapshots=3,
        num_blocks=24,
    ),
}


PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]]
TOKENS = st.integers(0, MODEL.vocab_size - 1)
OWNERS = {"": "", "other": "", "theirs": "they"}  # of requests with these salts


# A draft pays in small steps only.
COSTS = StepCosts.measured(([1, 6, 8, 24], [50, 60, 90, 300]), ([1, 4], [4, 6]), 0.1, 24)


def limits(
    model: FakeModel, depth: int, prefix_caching: bool, adaptive: bool, tiers: bool
) -> Limits:
    return Limits(
        tiers=("fake",) if tiers else (),
        adaptive_draft_length=adaptive,
        costs=COSTS,
        drafter_has_state=model.drafter_has_state,
        recurrent=model.recurrent,
        num_snapshots=model.num_snapshots,
        prompt_chunk=model.prompt_chunk,
        snapshot_interval=MODEL.block_size,
        num_slots=MODEL.num_slots,
        num_blocks=model.num_blocks,
        kv_windows=model.kv_windows,
        block_size=MODEL.block_size,
        max_model_len=MODEL.max_model_len,
        vocab_size=MODEL.vocab_size,
        max_num_batched_tokens=MODEL.max_step_tokens,
        max_draft_tokens=MODEL.max_draft_tokens,
        max_queue_len=6,
        pipeline_depth=depth,
        enable_prefix_caching=prefix_caching,
    )


class Lifecycle(RuleBasedStateMachine):
    state_class = SchedulerState

    @initialize(
        depth=st.integers(0, 2),
        caching=st.booleans(),
        seed=st.integers(0, 99),
        kind=st.sampled_from(list(KINDS)),
        adaptive=st.booleans(),
        faulty=st.sampled_from([0.0, 0.0, 0.2]),
        tiers=st.booleans(),
    )
    def start(
        self,
        depth: int,
        caching: bool,
        seed: int,
        kind: str,
        adaptive: bool,
        faulty: float,
        tiers: bool,
    ) -> None:
        self.state = self.state_class(limits(KINDS[kind], depth, caching, adaptive, tiers))
        self.worker = FakeEngine(
            KINDS[kind],
            seed=seed,
            status_of=self.status_of,
            drafter_fails=lambda rng: rng.random() < faulty,
        )
        self.sent: deque[pb.StepPlan] = deque()
        self.results: deque[pb.StepResult] = deque()
        self.dead: deque[pb.StepResult] = deque()
        self.broken: set[str] = set()
        self.given = dict[int, Order]()  # to the tiers
        self.now = 0.0
        self.count = self.num_kept = 0
        self.chances = random.Random(seed)
        self.tiers = FakeTiers(self.worker, self.chances)
        self.open_epoch()

    def open_epoch(self) -> None:
        state, epoch, infos = self.state, self.state.epoch + 1, [pb.WorkerInfo()]
        if state.epoch and self.chances.random() < 0.6:
            infos = [self.worker.crash(epoch, self.chances)]
        else:
            self.worker.reset(epoch)
        state.open_epoch(epoch, state.limits, kept_by(infos, state.planner, state.epoch))
        self.num_kept += state.num_kept
        if state.limits.has_tiers and CANARY not in state.open:
            state.add(canary(), self.now)

    def status_of(self, request_id: str, known: int) -> pb.RowStatus:
        return pb.NON_FINITE if request_id in self.broken and known % 5 == 4 else pb.OK

    @rule(
        prompt=st.builds(
            list.__add__, st.sampled_from(PREFIXES), st.lists(TOKENS, min_size=1, max_size=14)
        ),
        max_tokens=st.integers(1, 40),
        stop_ids=st.sets(TOKENS, max_size=2),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([*OWNERS]),
        draft_cap=st.sampled_from([None, None, 0, 1, 2]),
        prompt_logprobs=st.booleans(),
        resume=st.integers(0, 5),
        broken=st.integers(0, 9).map(lambda n: n == 0),
        tenant=st.sampled_from(["", "", "first", "second"]),
        weight=st.sampled_from([1.0, 4.0]),
        pooling=st.sampled_from([NO_POOLING, NO_POOLING, *POOLINGS.values()]),
    )
    def arrive(self, prompt: list[int], max_tokens: int, **wish: Any) -> None:
        self.count += 1
        sampling = SamplingParams(
            seed=self.count,
            stop_token_ids=wish["stop_ids"],
            want_prompt_logprobs=wish["prompt_logprobs"],
        )
        emitted = self.worker.model.complete(prompt, max_tokens, sampling)[: -1 - wish["resume"]]
        request = Request(
            id=f"r{self.count}",
            prompt_ids=prompt,
            emitted_ids=emitted if wish["resume"] < 3 else [],
            max_tokens=max_tokens,
            stop_ids=frozenset(wish["stop_ids"]),
            priority=wish["priority"],
            cache_salt=wish["salt"],
            cache_owner=OWNERS[wish["salt"]],
            draft_cap=wish["draft_cap"],
            want_prompt_logprobs=wish["prompt_logprobs"],
            sampling=sampling,
            tenant=wish["tenant"],
            weight=wish["weight"],
        )
        if wish["pooling"]:
            request = for_a_vector(request, wish["pooling"])
        full = self.has_no_room(request.tenant, request.weight)
        full &= not request.emitted_ids  # who has delivered tokens elsewhere is never refused
        if wish["broken"]:
            self.broken.add(request.id)
        if full:
            with pytest.raises(QueueFull) as refusal:
                self.state.add(request, self.now)
            assert refusal.value.retry_after
        else:
            self.state.add(request, self.now)

    def has_no_room(self, tenant: str, weight: float) -> bool:
        """A fair share of the queue is there for everybody, in at most its double."""
        waiting, bound = list(self.state.waiting), self.state.limits.max_queue_len
        if len(waiting) < bound:
            return False
        others = {
            seq.tenant.name: seq.tenant.weight for seq in waiting if seq.tenant.name != tenant
        }
        mine = sum(seq.tenant.name == tenant for seq in waiting)
        share = bound * weight / (weight + sum(others.values()))
        return len(waiting) >= 2 * bound or (mine > 0 and mine + 1 > share)

    @rule(index=st.integers(0, 99), seconds=st.floats(0, 5))
    def abort(self, index: int, seconds: float) -> None:
        self.now += seconds
        requests = self.state.asked_for  # nobody aborts a canary
        if requests and index < 30:
            self.state.abort(requests[index % len(requests)])

    @precondition(lambda self: self.state.running)
    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        self.state.preempt(self.state.running[index % len(self.state.running)])

    @precondition(lambda self: self.state.running)
    @rule(index=st.integers(0, 9))
    def displace(self, index: int) -> None:
        self.state.preempt(self.state.running[index % len(self.state.running)], displaced=True)

    @precondition(lambda self: self.state.speculation.alarm.suspended)
    @rule()
    def draft_again(self) -> None:
        """The pause after a drafter's fault is over."""
        self.state.speculation.alarm = Alarm()

    @rule(
        events=st.lists(
            st.sampled_from(["plan", "execute", "deliver", "move"]), min_size=3, max_size=40
        )
    )
    def run(self, events: list[str]) -> None:
        for event in events:
            getattr(self, event)()
            self.state.check()

    def plan(self) -> None:
        self.now += 0.1
        if len(self.state.in_flight) > self.state.limits.pipeline_depth:
            return
        plan = schedule(self.state, self.now)
        size = self.state.limits.block_size
        for order in self.state.tiers.take_unsent():
            self.given[order.number] = order
            wire = tier_order(order, self.state.epoch, size).SerializeToString()
            self.tiers.submit(pb.TierOrder.FromString(wire))
        if plan is not None:
            check_reuse(self.state, plan)
            self.sent.append(pb.StepPlan.FromString(to_proto(plan, 1000).SerializeToString()))

    def move(self) -> None:
        if self.tiers.orders:
            answer = self.tiers.execute()
            order = self.given.pop(answer.number)
            settle(self.state, tier_answer(order, [answer]))

    def execute(self) -> None:
        if self.sent:
            plan = self.sent.popleft()
            self.tiers.check(plan, self.worker)
            self.results.append(self.worker.execute(plan))

    def deliver(self) -> None:
        if not self.results:
            return
        try:
            outputs = commit_result(self.state, from_proto([self.results.popleft()]))
        except NonFiniteLogits:
            self.lose_epoch()
        else:
            for output in outputs:
                self.receive(output)

    @precondition(lambda self: self.dead)
    @rule()
    def deliver_dead(self) -> None:
        assert commit_result(self.state, from_proto([self.dead.popleft()])) == []

    @precondition(lambda self: self.sent or self.results)
    @rule(chance=st.integers(0, 3))
    def fence(self, chance: int) -> None:
        if not chance:
            self.lose_epoch()

    def lose_epoch(self) -> None:
        self.dead += self.results
        self.sent.clear()
        self.results.clear()
        self.tiers.orders.clear()
        self.given.clear()
        self.state.fence()
        self.open_epoch()

    def receive(self, output: Output) -> None:
        seq = output.seq
        if output.error is not None:
            assert isinstance(output.error, ModelFault)
            assert seq.request.id in self.broken
            return
        if seq.request.pooling:
            assert output.finish is Finish.POOLED
            assert output.pooled == self.worker.model.vector(
                seq.request.prompt_ids, seq.request.pooling, seq.request.label_ids
            )
            return
        expected = self.expected(seq)
        assert list(seq.tokens) == expected[: len(seq.tokens)]
        if output.finish is not None:
            assert list(seq.tokens) == expected
        known_before = len(seq.tokens) - len(output.token_ids)
        is_first = known_before == seq.prompt_len + len(seq.request.emitted_ids)
        if seq.request.want_prompt_logprobs and is_first and seq.prompt_len > 1:
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs.token_id == seq.request.prompt_ids[1:]

    def expected(self, seq: Sequence) -> list[int]:
        request = seq.request
        prompt_ids, max_tokens = request.prompt_ids, request.max_tokens
        return [*prompt_ids, *self.worker.model.complete(prompt_ids, max_tokens, request.sampling)]

    @invariant()
    def books_balance(self) -> None:
        self.state.check()

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.state.open and not self.state.in_flight:
                break
            if self.results:
                self.deliver()
            elif self.sent:
                self.execute()
            elif self.tiers.orders and self.chances.random() < 0.5:
                self.move()
            else:
                self.plan()
                assert self.sent or self.tiers.orders, "requests are open and nothing can run"
            self.state.check()
        while self.tiers.orders:
            self.move()
        assert not self.state.open, "a request starves"
        assert not self.state.quarantine
        assert self.state.pool.num_used == 0
        assert self.state.snapshots.pool.num_used == 0
        assert len(self.state.free_slots) == MODEL.num_slots
