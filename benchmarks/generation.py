"""Greedy answers of a rank in this process, planned by the scheduler's own core."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from surestep_proto import sampling_pb2 as pb
from surestep_proto import worker_pb2
from surestep_scheduler.config import SchedulerSettings
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule
from surestep_worker.startup.built import Built
from surestep_worker.step.result import Pending


def greedy(
    built: Built, prompts: Sequence[Sequence[int]], max_tokens: int, *, depth: int = 1
) -> list[list[int]]:
    """`max_tokens` ids for each prompt; nothing stops an answer earlier. All run at once."""
    state, epoch = SchedulerState(_limits(built.facts, depth)), 1000
    state.open_epoch(epoch, state.limits)
    built.runner.open(epoch)
    for index, prompt in enumerate(prompts):
        state.add(_request(index, prompt, max_tokens), now=float(index))
    answers = [list[int]() for _ in prompts]
    under_way: deque[Pending] = deque()
    while state.open or under_way:
        while len(under_way) <= depth:
            plan = schedule(state, now=0.0)
            if plan is None:
                break
            under_way.append(built.runner.launch(to_proto(plan, budget_ms=60_000)))
        if under_way:
            pending = under_way.popleft()
            pending.wait()
            for output in commit_result(state, from_proto([pending.finish()])):
                answers[int(output.seq.request.id)] += output.token_ids
    return answers


def _request(index: int, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        id=str(index),
        prompt_ids=list(prompt),
        emitted_ids=[],
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        sampling=pb.SamplingParams(top_p=1, repetition_penalty=1),
    )


def _limits(facts: worker_pb2.WorkerInfo, depth: int) -> Limits:
    settings = SchedulerSettings(
        worker_addresses=["none"],  # nobody is asked
        pipeline_depth=depth,
        adaptive_draft_length=False,
        enable_prefix_caching=False,
    )
    return settings.limits(facts)
