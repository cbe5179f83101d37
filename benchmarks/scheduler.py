"""Cost of planning a step and of applying its result, without a network; one JSON line.

    PYTHONPATH=proto:common:scheduler_svc python benchmarks/scheduler.py --running 256 --drafts 4

`plan_us` is schedule() and the serialised StepPlan, `apply_us` the parsed StepResult and
commit_result(), medians and 99th percentiles over steps in which every request decodes. Goal: 1 ms
for both together at 256 running requests.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from statistics import median, quantiles

import machine
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_scheduler.core.commit import commit_result
from surestep_scheduler.core.limits import Limits
from surestep_scheduler.core.sequence import Request
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.engine.wire import from_proto, to_proto
from surestep_scheduler.policy.schedule import schedule

PROMPT_LEN = 128  # tokens
VOCAB = 50_000
DEPTH = 1  # plans sent ahead


def make_state(running: int, drafts: int, steps: int) -> SchedulerState:
    """Requests that do not end while the benchmark runs."""
    max_len = PROMPT_LEN + (drafts + 1) * (steps + running) + 8
    limits = Limits(
        num_slots=running,
        num_blocks=running * (max_len // 16 + 2),
        block_size=16,
        max_model_len=max_len,
        vocab_size=VOCAB,
        max_num_batched_tokens=8192,
        max_draft_tokens=drafts,
        max_queue_len=running,
        pipeline_depth=DEPTH,
    )
    state = SchedulerState(limits)
    state.open_epoch(1, limits)
    rng = random.Random(0)
    for index in range(running):
        request = Request(
            id=str(index),
            prompt_ids=[rng.randrange(1, VOCAB) for _ in range(PROMPT_LEN)],
            emitted_ids=[],
            max_tokens=max_len,
            stop_ids=frozenset([0]),
            sampling=sampling_pb2.SamplingParams(),
        )
        state.add(request, now=float(index))
    return state


class Worker:
    """Answers plans; a uniformly random number of the drafts is accepted."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._lengths: dict[int, int] = {}

    def answer(self, plan: pb.StepPlan) -> bytes:
        """The serialised result."""
        result = pb.StepResult(epoch=plan.epoch, step=plan.step, slot=plan.slot)
        result.slot_epoch.extend(plan.slot_epoch)
        for slot, mode, num_tokens, max_drafts in zip(
            plan.slot, plan.mode, plan.num_tokens, plan.max_drafts, strict=True
        ):
            length = self._lengths.get(slot, 0)
            accepted = self._rng.randint(0, max_drafts)
            emitted = 0 if mode == pb.PREFILL else accepted + 1
            result.status.append(pb.OK)
            result.len_before.append(length)
            result.n_drafts.append(max_drafts)
            result.n_accepted.append(accepted)
            result.n_emitted.append(emitted)
            result.token_ids.extend(self._rng.randrange(1, VOCAB) for _ in range(emitted))
            self._lengths[slot] = length + (num_tokens or emitted)
        return result.SerializeToString()


def run(running: int, drafts: int, steps: int) -> dict[str, float]:
    """Microseconds of both halves of a step."""
    state, worker = make_state(running, drafts, steps), Worker()
    answers: deque[bytes] = deque()
    plan_us, apply_us = list[float](), list[float]()
    while len(apply_us) < steps:
        while len(answers) <= DEPTH:
            began = time.thread_time()
            plan = schedule(state, now=0.0)
            assert plan is not None
            message = to_proto(plan, budget_ms=1000)
            message.SerializeToString()
            plan_us.append(1e6 * (time.thread_time() - began))
            answers.append(worker.answer(message))
        answer = answers.popleft()
        began = time.thread_time()
        outputs = commit_result(state, from_proto([pb.StepResult.FromString(answer)]))
        apply_us.append(1e6 * (time.thread_time() - began))
        if len(outputs) < running:  # prompts are still being computed
            plan_us.clear()
            apply_us.clear()
    return {
        "plan_us": median(plan_us),
        "apply_us": median(apply_us),
        "total_us": median(plan_us) + median(apply_us),
        "plan_p99_us": quantiles(plan_us, n=100)[-1],
        "apply_p99_us": quantiles(apply_us, n=100)[-1],
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    figures = run(arguments.running, arguments.drafts, arguments.steps)
    rounded = {name: round(value, 1) for name, value in figures.items()}
    print(json.dumps({**vars(arguments), **rounded, **machine.describe()}))


if __name__ == "__main__":
    main()
