"""The scheduler core in front of a FakeEngine: steps one by one, results `depth` plans late."""

from __future__ import annotations

from collections import deque
from typing import Any

from support.fakes.engine import FakeEngine
from support.fakes.model import Drafter, FakeModel, StatusOf
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.messages import Plan
from surestep_scheduler.core.sequence import Output, Request, Sequence
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule
from surestep_scheduler.speculation.contest import WITHOUT_STATE
from surestep_scheduler.speculation.draft_length import DraftChoice


def perfect(rng: object, right: list[int]) -> list[int]:
    """Drafts that are all right."""
    return right


def hopeless(rng: object, right: list[int]) -> list[int]:
    """Drafts that are all wrong."""
    return [token ^ 1 for token in right]


def worthwhile(choice: DraftChoice) -> DraftChoice:
    """Drafts as a contest without trials decides about them."""
    return choice if choice.value > WITHOUT_STATE.begin else choice.without_drafts()


class FakeLoop:
    """`plans` are those whose result was applied, `unanswered` those in flight with their results."""

    def __init__(
        self,
        model: FakeModel,
        *,
        depth: int = 0,
        drafter: Drafter = perfect,
        status_of: StatusOf | None = None,
        **changes: Any,
    ) -> None:
        values: dict[str, Any] = {
            "num_slots": model.num_slots,
            "num_blocks": model.num_blocks,
            "block_size": model.block_size,
            "kv_windows": model.kv_windows,
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
            "max_num_batched_tokens": model.max_step_tokens,
            "max_draft_tokens": model.max_draft_tokens,
            "max_queue_len": 100,
            "pipeline_depth": depth,
            "drafter_has_state": model.drafter_has_state,
            "drafter_looks_up": model.drafter_looks_up,
            "recurrent": model.recurrent,
            "num_snapshots": model.num_snapshots,
            "prompt_chunk": model.prompt_chunk,
            "snapshot_interval": model.block_size,
        }
        limits = Limits(**(values | changes))
        self.state = SchedulerState(limits)
        self.state.open_epoch(1, limits)
        self.engine = FakeEngine(model, drafter=drafter, status_of=status_of)
        self.engine.reset(1)
        self.outputs: list[Output] = []
        self.plans: list[Plan] = []
        self.results: list[pb.StepResult] = []
        self.unanswered: deque[tuple[Plan, pb.StepResult]] = deque()
        self._count = 0

    def add(self, prompt: list[int], max_tokens: int, **wishes: Any) -> Sequence:
        """Queue a request."""
        self._count += 1
        request = Request(
            id=f"r{self._count}",
            prompt_ids=prompt,
            emitted_ids=[],
            max_tokens=max_tokens,
            **({"sampling": sampling_pb2.SamplingParams(seed=self._count)} | wishes),
        )
        return self.state.add(request, now=float(self._count))

    def step(self) -> Plan | None:
        """Plan as far ahead as the depth allows, then apply one result; returns its plan."""
        while len(self.unanswered) <= self.state.limits.pipeline_depth:
            plan = schedule(self.state, now=0.0)
            if plan is None:
                break
            wire = to_proto(plan, 1000).SerializeToString()
            self.unanswered.append((plan, self.engine.execute(pb.StepPlan.FromString(wire))))
        if not self.unanswered:
            return None
        plan, result = self.unanswered.popleft()
        self.plans.append(plan)
        self.results.append(result)
        self.outputs += commit_result(self.state, from_proto([result]))
        self.state.check()
        return plan

    def fence(self) -> None:
        """Lose the epoch and begin the next."""
        self.unanswered.clear()
        self.state.fence()
        self.state.open_epoch(self.state.epoch + 1, self.state.limits)
        self.engine.reset(self.state.epoch)

    def run(self) -> None:
        """Until nothing is open."""
        while self.step() is not None:
            pass

    def complete(self, prompt: list[int], max_tokens: int, **wishes: Any) -> list[int]:
        """All tokens of one request that is served alone."""
        seq = self.add(prompt, max_tokens, **wishes)
        self.run()
        return list(seq.tokens)
