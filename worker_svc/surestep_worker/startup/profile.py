"""Profile a rank before it is ready: check that the model computes finite numbers and the drafter's
drafts are accepted, and measure what steps cost.

Plans are made here as a scheduler would make them, and run by the runner that will serve. All ranks
of a group profile the same steps; rank 0's clock decides for all of them when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.drafters import DeviceDrafter
from surestep_worker.step.buckets import add_admission, add_row
from surestep_worker.step.runner import Runner
from surestep_worker.step.step import RankContext

_CHECK_S = 3.0  # most that the check may take: so long only where a head is in doubt
_COSTS_S = 0.25  # most that costs may take, which the scheduler corrects by the steps that it sees
_REPEATS = 2
_CONTEXT = 16  # tokens before every row
_LONG_CONTEXT = 1024
_CHECK_ROWS = 4  # texts on which the drafter is checked
_CHECK_WINDOWS = 12
_LEAST_WINDOWS = 4  # for a share of accepted drafts that means something
_SOUND = 0.07  # share of these drafts that even a weak head has accepted
_BY_CHANCE = 0.01  # share of starts in which such a head may seem to do worse
_PROMPT = 8  # tokens in each text whose logits are checked


class Check(NamedTuple):
    """Count of accepted drafts of greedily generated text. Rank 0 knows."""

    windows: int  # that it was to draft for
    drafts: int
    accepted: int

    def __str__(self) -> str:
        return f"{self.accepted} of {self.drafts} drafts accepted"

    def after(self, result: pb.StepResult) -> Check:
        """Return the check with the drafts of one more step."""
        drafts, accepted = sum(result.n_drafts), sum(result.n_accepted)
        windows = self.windows + len(result.n_drafts)
        return Check(windows, self.drafts + drafts, self.accepted + accepted)

    @property
    def is_low(self) -> bool:
        """Return whether a sound head would hardly ever have so few accepted, or fewer."""
        chance = sum(_binomial(n, self.drafts, _SOUND) for n in range(self.accepted + 1))
        return chance < _BY_CHANCE

    @property
    def failed(self) -> bool:
        """Return whether the drafter was asked and drafted nothing."""
        return self.windows > 0 and self.drafts == 0


def _binomial(hits: int, trials: int, share: float) -> float:
    """Return the probability of so many hits, each of which comes with the probability `share`."""
    ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return math.exp(ways + hits * math.log(share) + (trials - hits) * math.log(1 - share))


class Sample(NamedTuple):
    """Sample of a step, in microseconds."""

    prepare: int
    rest: int
    num_tokens: int
    drafts: int  # of the row with the most


def measure_costs(runner: Runner) -> pb.StepCosts:
    """Return the costs of steps with few and many rows; empty if the sizes leave no room to
    measure."""
    profiler, costs = _Profiler(runner.with_own_epochs(), _COSTS_S), pb.StepCosts()
    head, points = runner.context.model.draft_head, dict[int, float]()
    costs.drafts_at_once = head is not None and head.block is not None
    num_rows, needed_s = 1, 0.0
    while num_rows <= profiler.max_rows and profiler.has_time(needed_s):
        began_s = profiler.spent_s
        plain, verify = profiler.time_rows(num_rows)
        # Twice as many rows may take twice as long: many that would not end in time are not begun.
        needed_s = 2 * (profiler.spent_s - began_s) if num_rows > 1 else 0.0
        points[num_rows] = plain.prepare + plain.rest
        if verify.drafts:
            points.setdefault(verify.num_tokens, plain.prepare + verify.rest)
            costs.draft_rows.append(num_rows)
            passes = 1 if costs.drafts_at_once else verify.drafts
            costs.draft_us.append(max(0, verify.prepare - plain.prepare) / passes)
        num_rows *= 2
    for tokens, step_us in sorted(points.items()):
        costs.tokens.append(tokens)
        costs.step_us.append(step_us)
    if points:
        costs.us_per_context_token = profiler.context_cost()
    return costs


def output_is_finite(runner: Runner) -> bool:
    """Return whether the logits, or vectors, of a few short texts are finite on rank 0."""
    result = _Profiler(runner.with_own_epochs(), _CHECK_S).read_prompts()
    return all(status == pb.OK for status in result.status)


def check_drafter(runner: Runner) -> Check:
    """Let a drafter with state follow the model for some windows; others give Check(0, 0, 0)."""
    profiler = _Profiler(runner.with_own_epochs(), _CHECK_S)
    if not isinstance(runner.context.drafter, DeviceDrafter) or not profiler.max_rows:
        return Check(0, 0, 0)
    rows, check = min(_CHECK_ROWS, profiler.max_rows), Check(0, 0, 0)
    profiler.admit(range(rows), context=0)
    for window in range(_CHECK_WINDOWS):
        # No more drafts than are still to come could make so many accepted ones low.
        at_most = rows * _CHECK_WINDOWS * runner.context.max_draft_tokens
        surely = check.drafts > 0 and not check._replace(drafts=at_most).is_low
        decided = window >= _LEAST_WINDOWS and surely
        if not profiler.has_time(math.inf if decided else 0.0):
            break
        check = check.after(profiler.step(pb.VERIFY))
    return check


@dataclass
class _Profiler:
    """Steps slots 0, 1, .., each with its own block table, without a scheduler."""

    runner: Runner  # not shared
    budget_s: float  # most that steps may take
    _slots: list[int] = field(init=False, default_factory=list)
    _step: int = field(init=False, default=0)
    _epoch: int = field(init=False, default=0)
    _began: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        width = self.context.max_draft_tokens + 1
        # A prompt's token, the decode rows and the windows, each with room for all drafts.
        self._length = _CONTEXT + 1 + (_REPEATS + max(_REPEATS, _CHECK_WINDOWS)) * width

    @property
    def context(self) -> RankContext:
        """The context that will serve."""
        return self.runner.context

    @property
    def max_rows(self) -> int:
        """Number of slots for which there are blocks, 0 if a slot is too short."""
        slots = self.context.slots
        if self._length > slots.tokens.shape[1] - self.context.most_drafts - 1:
            return 0
        blocks = -(-self._length // slots.block_size)
        return min(slots.num_slots, self._blocks_of_group // blocks)

    @property
    def _blocks_of_group(self) -> int:
        """Number of blocks that there are for each KV group."""
        return (self.context.caches.kv.num_blocks - 1) // len(self.context.slots.block_tables)

    @property
    def spent_s(self) -> float:
        """Seconds that steps have taken, by this rank's clock."""
        return time.monotonic() - self._began

    def has_time(self, needed_s: float = 0.0) -> bool:
        """Return whether there are so many seconds left, by the clock of rank 0."""
        left = torch.tensor([int(self.spent_s + needed_s < self.budget_s)])
        return bool(self.context.tp.broadcast(left).item())

    def time_rows(self, num_rows: int) -> tuple[Sample, Sample]:
        """Return the fastest of some DECODE steps and of some VERIFY steps."""
        self.admit(range(num_rows), _CONTEXT)
        plain = [_sample(self.step(pb.DECODE)) for _ in range(_REPEATS)]
        if not self.context.max_draft_tokens:
            return _fastest(plain), Sample(0, 0, 0, 0)
        return _fastest(plain), _fastest(_sample(self.step(pb.VERIFY)) for _ in range(_REPEATS))

    def context_cost(self) -> float:
        """Return the microseconds per token of context: of a long row beside a short one."""
        slots = self.context.slots
        room = min(slots.tokens.shape[1], self._blocks_of_group * slots.block_size) - self._length
        context = min(_LONG_CONTEXT, room) // slots.block_size * slots.block_size
        if context <= _CONTEXT:
            return 0.0
        took_us = {_CONTEXT: math.inf, context: math.inf}
        for length in (_CONTEXT, context) * 2:  # in turns, as others may use the machine
            self.admit([0], length)
            sample = _fastest(_sample(self.step(pb.DECODE)) for _ in range(_REPEATS))
            took_us[length] = min(took_us[length], sample.prepare + sample.rest)
        return max(0.0, took_us[context] - took_us[_CONTEXT]) / (context - _CONTEXT)

    def read_prompts(self) -> pb.StepResult:
        """Run a step of short prompts, with tokens from all over the vocabulary."""
        slots, vocab = self.context.slots, self.context.model.config.vocab_size
        longest = slots.tokens.shape[1] - self.context.most_drafts - 2
        length = min(_PROMPT, longest, slots.block_size, self.context.max_step_tokens)
        rows = min(_CHECK_ROWS, slots.num_slots, self._blocks_of_group)
        rows = min(rows, self.context.max_step_tokens // length)
        self._open(range(rows))
        plan = self._plan()
        for slot in range(rows):
            ids = [(slot * length + i) * vocab // (rows * length) for i in range(length)]
            add_admission(plan, slot, ids, self._tables(slot, 1), slots.tokens.shape[1])
            if self.context.model.has_head:
                add_row(plan, slot, pb.PREFILL_LAST, 0, num_tokens=length)
            else:
                plan.admissions[-1].ClearField("sampling")
                plan.admissions[-1].pooling = sampling_pb2.LAST_TOKEN
                add_row(plan, slot, pb.POOL, 0, num_tokens=length)
        return self._run(plan)

    def admit(self, slots: Iterable[int], context: int) -> None:
        """Open an epoch with these slots, with `context` tokens of arbitrary KV in each."""
        self._open(slots)
        recurrent = self.context.caches.recurrent
        if recurrent is not None and not recurrent.num_snapshots:
            context = 0
        if recurrent is not None and context:  # a state of zeros is enough
            recurrent.mark_taken(np.array([1]), np.array([context]))
        plan = self._plan()
        blocks = -(-(context + self._length) // self.context.slots.block_size)
        max_len = self.context.slots.tokens.shape[1]
        for i, slot in enumerate(self._slots):
            ids = [self._token(slot)] * (context + 1)
            add_admission(plan, slot, ids, self._tables(i, blocks), max_len, num_cached=context)
            plan.admissions[-1].snapshot_id = int(recurrent is not None and context > 0)
            if self.context.caches.draft is not None:  # which begins with the first token
                plan.admissions[-1].drafter_len = 0
            add_row(plan, slot, pb.PREFILL_LAST, context, num_tokens=1)
        self._run(plan)

    def step(self, mode: pb.DecodeMode) -> pb.StepResult:
        """Run one row of this mode in every slot."""
        plan, slots = self._plan(), self.context.slots
        drafting = mode == pb.VERIFY
        stateful = drafting and isinstance(self.context.drafter, DeviceDrafter)
        for slot in self._slots:
            lag = int(slots.committed[slot] - slots.drafter_len[slot]) * stateful
            max_drafts = self.context.max_draft_tokens * drafting
            last_step = int(slots.last_step[slot])
            length = int(slots.committed[slot])
            add_row(plan, slot, mode, length, lag=lag, max_drafts=max_drafts, last_step=last_step)
        return self._run(plan)

    def _tables(self, number: int, blocks: int) -> list[range]:
        """Return so many blocks for each KV group, other ones for every `number` from 0 on."""
        groups = len(self.context.slots.block_tables)
        firsts = (1 + (number * groups + group) * blocks for group in range(groups))
        return [range(first, first + blocks) for first in firsts]

    def _open(self, slots: Iterable[int]) -> None:
        self._epoch, self._step, self._slots = self._epoch + 1, 0, list(slots)
        self.runner.open(self._epoch)

    def _token(self, slot: int) -> int:
        """Return the token of a slot's prompt: slots have tokens from all over the vocabulary."""
        vocab_size = self.context.model.config.vocab_size
        return (slot + 1) * vocab_size // (_CHECK_ROWS + 1) % vocab_size

    def _plan(self) -> pb.StepPlan:
        return pb.StepPlan(epoch=self._epoch, step=self._step + 1)

    def _run(self, plan: pb.StepPlan) -> pb.StepResult:
        """Run the plan, and capture its shape, so that the next step of it is as fast as in
        serving."""
        self._step += 1
        result, ended = self.runner.step(plan), time.monotonic()
        self.runner.capture_missed()
        self._began += time.monotonic() - ended  # not part of the steps' time
        return result


def _sample(result: pb.StepResult) -> Sample:
    timings = result.timings
    return Sample(
        prepare=timings.prepare_us,
        rest=timings.forward_us + timings.sample_us,
        num_tokens=len(result.n_drafts) + sum(result.n_drafts),
        drafts=max(result.n_drafts, default=0),
    )


def _fastest(samples: Iterable[Sample]) -> Sample:
    return min(samples, key=lambda sample: sample.prepare + sample.rest)
