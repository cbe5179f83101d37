"""Executes step plans on one rank: their differences first, then their rows, on their threads.

Their number on CPUs is as few as are as quick as all. A step of few tokens is as quick as memory is
read, which half of the threads may do as well. The cores that they leave are those of the gateway
and the scheduler, for whose work the next step has to wait otherwise. Which number is best depends
on the machine, the model and what else runs, so it is found out while serving: now and then steps
of one size take turns with twice or half as many threads, and what was quicker stays. How many
there are changes no bit of a result.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from statistics import median
from typing import Any

import numpy as np
import torch
from surestep_common.errors import InvalidRequest
from surestep_common.invariants import LedgerError
from surestep_proto import worker_pb2 as pb
from surestep_proto.sampling_pb2 import Grammar

from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.tiers.moves import Moves

from .plan import PlanBounds, Rows, check_rows, most_tokens, read_rows
from .result import Pending
from .slots import extend_groups
from .step import RankContext, StepLauncher

logger = logging.getLogger(__name__)


class Runner:
    """Executor of a rank. Not thread-safe: every call comes from the step thread."""

    def __init__(self, context: RankContext, launcher: StepLauncher | None = None) -> None:
        """Use the `launcher` of another runner, whose epochs are over, if it is given."""
        self.context = context
        self._slots, self._held = context.slots, context.caches.held
        self._launcher = launcher or StepLauncher(context, context.step_ops)
        self._bounds = _bounds(context)
        self.moves: Moves | None = None  # None: there are no tiers behind the blocks
        self._epoch = 0
        self._step = 0

    def with_own_epochs(self) -> Runner:
        """Return a runner with epochs of its own on the same context, for steps before serving."""
        return Runner(self.context, self._launcher)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile kernels and capture steps, before the first step."""
        self._launcher.prepare()

    def open(self, epoch: int) -> None:
        """Begin an epoch with all slots empty. Raises InvalidRequest for an old epoch."""
        if epoch <= self._epoch:
            raise InvalidRequest(f"epoch {epoch} is not newer than {self._epoch}", param="epoch")
        if self.moves is not None:
            self.moves.fence()
        self._epoch, self._step = epoch, 0
        for slot in range(self._slots.num_slots):
            self._free(slot)
        self._slots.reset()
        self._launcher.open()
        if self.context.caches.recurrent is not None:
            self.context.caches.recurrent.reset()

    @property
    def num_late_compilations(self) -> int:
        """Return the number of kernels that were compiled while serving."""
        return self.context.compilations.num_late

    @property
    def captured(self) -> tuple[int, int]:
        """Return the number of captured kinds of step, and of steps that none of them fitted."""
        return self._launcher.captured

    @property
    def graph_bytes(self) -> int:
        """Return the device memory that all captured steps will take. Known after `prepare`."""
        return self._launcher.graph_bytes

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture one kind of step, if any is left and this rank is alone. Call it when idle."""
        self._launcher.capture_next()

    @torch.inference_mode()
    def capture_missed(self) -> None:
        """Capture every kind that would have fitted an earlier step."""
        self._launcher.capture_missed()

    def compile(self, grammar: Grammar) -> Future[Any]:
        """Compile a grammar that is going to be needed. May be called from any thread.

        Cancel the future if it is not. It has an InvalidRequest for one that cannot be.
        """
        return self.context.grammars.compile(grammar)

    @property
    def adapters(self) -> AdapterPool:
        """Return the pool, which works beside the steps. Raises InvalidRequest without one."""
        if self.context.adapters is None:
            raise InvalidRequest("adapters need --enable-lora", param="enable_lora")
        return self.context.adapters

    def check_peers(self) -> None:
        """Raise Unavailable when a rank of the group is gone. Call it between epochs."""
        self.context.tp.check_peers()

    @torch.inference_mode()
    def launch(self, plan: pb.StepPlan) -> Pending:
        """Begin to execute a plan. Raises LedgerError or InvalidRequest, which end the epoch."""
        rows = self._apply(plan)
        with self.context.threads(most_tokens(rows)):
            return self._launcher.launch(plan, rows)

    def step(self, plan: pb.StepPlan) -> pb.StepResult:
        """Execute one plan. Raises as `launch` and Pending.finish do."""
        pending = self.launch(plan)
        pending.wait()
        return pending.finish()

    def _apply(self, plan: pb.StepPlan) -> Rows:
        """Apply a plan's differences, in the protocol's order, and return its rows, checked."""
        if plan.epoch != self._epoch or plan.step != self._step + 1:
            raise InvalidRequest(
                f"plan {plan.epoch}/{plan.step} does not follow {self._epoch}/{self._step}",
                param="step",
            )
        self._bounds.check(plan, self._slots.num_blocks)
        self._keep(plan)
        if self.moves is not None and plan.step == 1:
            self.moves.begin(plan.epoch)
        for slot, tenancy in zip(plan.freed_slots, plan.freed_slot_epochs, strict=True):
            self._launcher.leave(slot)
            self._free(slot)
            self._slots.free(slot, tenancy)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._restore(admission)
            self._check_adapter(admission)
            if self.context.recent is not None:
                self.context.recent.admit(admission.slot, admission.text_group)
            if admission.pooling:
                self.context.pooling.admit(admission.slot)
            else:
                request = admission.slot, admission.sampling, admission.prompt_len
                self.context.sampling.admit(*request)
                if self._slots.guided[admission.slot]:
                    self.context.grammars.admit(*request)
        self._change_tables(plan)
        rows = read_rows(plan)
        check_rows(
            rows,
            self._slots,
            most_drafts=self.context.most_drafts,
            most_proposed=self.context.max_draft_tokens,
        )
        self._step = plan.step
        self._slots.last_step[rows.slot] = plan.step
        return rows

    def _free(self, slot: int) -> None:
        self.context.sampling.free(slot)
        if self._slots.guided[slot]:
            self.context.grammars.free(slot)

    def _keep(self, plan: pb.StepPlan) -> None:
        """Go on with what the first plan of an epoch keeps of earlier ranks."""
        held, recurrent = self._held, self.context.caches.recurrent
        if plan.HasField("kept") and (plan.step != 1 or held is None):
            raise LedgerError(f"step {plan.step} keeps blocks that are not held")
        if held is not None and plan.step == 1:
            kept = held.begin(plan)
            if recurrent is not None:
                recurrent.mark_taken(*kept)

    def _restore(self, admission: pb.Admission) -> None:
        """Restore the recurrent state of a cached prefix from the snapshot of its exact length.

        Raises LedgerError for one whose state the drafter is said to have.
        """
        if admission.drafter_len and self.context.caches.draft is not None:
            raise LedgerError(f"slot {admission.slot}: the drafter has no state of cached prefixes")
        recurrent = self.context.caches.recurrent
        if recurrent is None or not admission.num_cached:
            return
        recurrent.restore(admission.snapshot_id, admission.slot, admission.num_cached)

    def _check_adapter(self, admission: pb.Admission) -> None:
        """Raise LedgerError where this rank has not the adapter that the request is to have."""
        pool, place = self.context.adapters, admission.adapter - 1
        here = "" if pool is None or place < 0 else pool.digest_at(place)
        if here != admission.adapter_digest:
            raise LedgerError(
                f"slot {admission.slot}: adapter '{here}' is at place {place}, the request is to "
                f"have '{admission.adapter_digest}'"
            )

    def _change_tables(self, plan: pb.StepPlan) -> None:
        columns = plan.release_slots, plan.release_groups, plan.release_counts
        for slot, group, count in zip(*columns, strict=True):
            self._slots.give_back(slot, group, count)
        block_ids = np.array(plan.block_ids[:], dtype=np.int64)
        ends = np.cumsum(np.array(plan.extend_counts[:], dtype=np.int64))
        extended = plan.extend_slots, extend_groups(plan), plan.extend_counts
        for slot, group, count, end in zip(*extended, ends, strict=True):
            ids = block_ids[end - count : end]
            num_cached = self._slots.num_cached_entries(slot, group)
            if self.moves is not None:
                self.moves.check(ids, num_cached[0])
            if self._held is not None:
                self._held.extend(ids, *num_cached)
            self._slots.extend(slot, ids, group)


def _bounds(context: RankContext) -> PlanBounds:
    slots, recurrent = context.slots, context.caches.recurrent
    return PlanBounds(
        num_slots=slots.num_slots,
        max_tokens=slots.tokens.shape[1],
        num_blocks=context.caches.kv.num_blocks,
        num_groups=len(slots.block_tables),
        max_blocks_per_slot=slots.block_tables.shape[2],
        vocab_size=context.model.config.vocab_size,
        num_snapshots=recurrent.num_snapshots if recurrent is not None else 0,
        headless=not context.model.has_head,
        num_adapters=context.adapters.sizes.places if context.adapters is not None else 0,
    )


_MOST_TOKENS = 7  # of a step that may have fewer; larger ones are bound by arithmetic
_TRIES = 6  # steps with each of the two numbers
_UNTIL_FIRST, _BETWEEN = 8, 400  # steps of a size before its first trial, and between two
_AS_QUICK = 1.02  # fewer threads may take so much longer than more


class _Trial:
    """Steps in turns with `other` threads and with those that they have."""

    def __init__(self, other: int, now: int) -> None:
        self.other, self._now = other, now
        self._times: dict[int, list[float]] = {other: [], now: []}

    @property
    def next(self) -> int:
        """The number of threads that the next step should have."""
        times = self._times
        return self.other if len(times[self.other]) <= len(times[self._now]) else self._now

    def winner(self, num_threads: int, took_s: float) -> int | None:
        """Count a step; return what the steps should have from now on, None until that is known."""
        self._times[num_threads].append(took_s)
        if min(map(len, self._times.values())) < _TRIES:
            return None
        fewer, more = sorted(self._times)
        quick = median(self._times[fewer]) <= _AS_QUICK * median(self._times[more])
        return fewer if quick else more


class ThreadChoice:
    """The number of threads for steps of one size, at most `most`."""

    def __init__(self, most: int) -> None:
        self.now = most
        self._most = most
        self._left = _UNTIL_FIRST  # steps until the next trial
        self._trial: _Trial | None = None
        self._fewer_next = True  # the next trial is of half as many

    @property
    def next(self) -> int:
        """The number that the next step should have."""
        return self._trial.next if self._trial is not None else self.now

    def took(self, num_threads: int, took_s: float) -> None:
        """Count a step that had so many threads."""
        if self._trial is None:
            self._left -= 1
            if self._left <= 0:
                self._begin()
            return
        winner = self._trial.winner(num_threads, took_s)
        if winner is not None:
            self._fewer_next = winner < self.now if winner != self.now else not self._fewer_next
            self.now, self._trial, self._left = winner, None, _BETWEEN

    def _begin(self) -> None:
        fewer, more = self.now // 2, min(2 * self.now, self._most)
        other = fewer if fewer and (self._fewer_next or more == self.now) else more
        if other != self.now:
            self._trial = _Trial(other, self.now)


class StepThreads:
    """Sets the number of threads of each step of a rank."""

    def __init__(
        self,
        most: int,
        set_num_threads: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._most = self._set = most
        self._set_num_threads = set_num_threads
        self._clock = clock
        self._choices: dict[int, ThreadChoice] = {}  # by the bits of a step's number of tokens

    @contextlib.contextmanager
    def of_step(self, num_tokens: int) -> Iterator[None]:
        """Give a step of so many tokens its threads, and see how long it takes."""
        if num_tokens > _MOST_TOKENS:
            self._use(self._most)
            yield
            return
        size = num_tokens.bit_length()
        choice = self._choices.setdefault(size, ThreadChoice(self._most))
        num_threads, before = choice.next, choice.now
        self._use(num_threads)
        began = self._clock()
        yield
        choice.took(num_threads, self._clock() - began)
        if choice.now != before:
            logger.debug("steps of %d bits of tokens: %d threads", size, choice.now)

    def _use(self, num_threads: int) -> None:
        if num_threads != self._set:
            self._set = num_threads
            self._set_num_threads(num_threads)
