"""Run the steps that need most memory before serving, so that it can be measured.

What a step needs follows from its tokens, from its sampled positions and from their sampling
parameters; hardly from the content of the caches. So all rows share one KV block.
"""

from __future__ import annotations

from collections.abc import Iterator

from surestep_proto import sampling_pb2, supervisor_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.drafters import DeviceDrafter
from surestep_worker.step.buckets import EVERYTHING, add_admission, add_row
from surestep_worker.step.runner import Runner

_BLOCK = 1  # of every slot, everywhere: its content does not matter
_LOGPROBS = sampling_pb2.SamplingParams(
    want_logprobs=True, num_top_logprobs=20, want_prompt_logprobs=True, num_top_prompt_logprobs=20
)


def run_largest_steps(runner: Runner) -> None:
    """Run steps of the maximum number of tokens: prompts alone, and windows beside a prompt.

    All of them use every sampling parameter and return all log-probabilities, those of prompts
    included. The number of rows goes from one up: attention divides few rows among more programs,
    which takes memory too.
    """
    steps = _Steps(runner.with_own_epochs())
    steps.run_prompts()
    if runner.context.model.has_head:
        for rows in steps.row_counts():
            steps.run_windows(rows)


class _Steps:
    """Epochs of one or two steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner, context = runner, runner.context
        self._slots, self._most_tokens = context.slots, context.max_step_tokens
        self._width = context.max_draft_tokens + 1
        self._max_len = self._slots.tokens.shape[1]
        self._longest = self._max_len - self._width - 1  # prompt: it leaves room for a window
        self._epoch = self._step = 0

    def row_counts(self) -> Iterator[int]:
        """Yield 1, 2, 4, .. and the number of windows that a step has room for."""
        most = max(1, min(self._slots.num_slots, self._most_tokens // self._width))
        rows = 1
        while rows < most:
            yield rows
            rows *= 2
        yield most

    def run_prompts(self) -> None:
        """Run a step full of prompt tokens, and compute a vector or a token of each prompt."""
        plan = self._open()
        left = self._most_tokens
        for slot in range(self._slots.num_slots):
            if not left:
                break
            length = min(left, self._longest)
            self._add_prompt(plan, slot, length)
            left -= length
        self._run(plan)

    def run_windows(self, rows: int) -> None:
        """Run a window in every row and, if there is a slot left, a prompt that fills the rest."""
        plan = self._open()
        for slot in range(rows):
            self._add_prompt(plan, slot, 1)
        result = self._run(plan)
        plan, context = self._plan(), self._runner.context
        mode, max_drafts = (pb.VERIFY, self._width - 1) if self._width > 1 else (pb.DECODE, 0)
        lag = int(isinstance(context.drafter, DeviceDrafter) and max_drafts > 0)
        for slot, status in enumerate(result.status):
            if status == pb.OK:  # a model whose output is not finite is detected later
                add_row(plan, slot, mode, 1, lag=lag, max_drafts=max_drafts, last_step=1)
        rest = min(self._most_tokens - rows * self._width, self._longest)
        if rows < self._slots.num_slots and rest > 0:
            self._add_prompt(plan, rows, rest)
        self._run(plan)

    def _add_prompt(self, plan: pb.StepPlan, slot: int, length: int) -> None:
        """Add a request whose whole prompt is computed in this step."""
        blocks = -(-(length + self._width + 1) // self._slots.block_size)
        groups = len(self._slots.block_tables)
        add_admission(plan, slot, [0] * length, [[_BLOCK] * blocks] * groups, self._max_len)
        admission, mode = plan.admissions[-1], pb.PREFILL_LAST
        if self._runner.context.model.has_head:
            admission.sampling.CopyFrom(EVERYTHING)
            admission.sampling.MergeFrom(_LOGPROBS)
        else:
            admission.ClearField("sampling")
            admission.pooling, mode = sampling_pb2.MEAN, pb.POOL
        add_row(plan, slot, mode, 0, num_tokens=length)

    def _open(self) -> pb.StepPlan:
        self._epoch, self._step = self._epoch + 1, 0
        self._runner.open(self._epoch)
        return self._plan()

    def _plan(self) -> pb.StepPlan:
        return pb.StepPlan(epoch=self._epoch, step=self._step + 1)

    def _run(self, plan: pb.StepPlan) -> pb.StepResult:
        self._step += 1
        self._runner.context.heartbeat.progress(
            supervisor_pb2.WARMING_UP
        )  # each may compile kernels
        return self._runner.step(plan)
