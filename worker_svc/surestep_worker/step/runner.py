"""Executes step plans on one rank: their differences first, then their rows."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from surestep_common.errors import InvalidRequest
from surestep_proto import worker_pb2 as pb
from surestep_proto.sampling_pb2 import Grammar

from .plan import PlanBounds, Rows, check_rows, most_tokens, read_rows
from .result import Pending
from .slots import extend_groups
from .step import RankContext, StepLauncher


class Runner:
    """One rank's executor. Not thread-safe: every call comes from the step thread."""

    def __init__(self, context: RankContext, launcher: StepLauncher | None = None) -> None:
        """Use the `launcher` of another runner, whose epochs are over, if it is given."""
        self.context = context
        self._slots = context.slots
        self._launcher = launcher or StepLauncher(context, context.step_ops)
        self._bounds = _bounds(context)
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
        self._epoch, self._step = epoch, 0
        self._slots.reset()
        self._launcher.open()
        if self.context.caches.recurrent is not None:
            self.context.caches.recurrent.reset()
        for slot in range(self._slots.num_slots):
            self._free(slot)

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

    @property
    def capture_is_due(self) -> bool:
        """Whether a kind of step should be captured now. Called from any thread."""
        return self._launcher.capture_is_due

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture one kind of step, if any is left. Call it between steps, or when idle."""
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

    def check_peers(self) -> None:
        """Raise Unavailable when a rank of the group is gone. Call it between epochs."""
        self.context.tp.check_peers()

    @torch.inference_mode()
    def launch(self, plan: pb.StepPlan) -> Pending:
        """Begin to execute a plan. Raises LedgerError or InvalidRequest, which end the epoch."""
        rows, threads = self._apply(plan), self.context.threads
        if threads is None:
            return self._launcher.launch(plan, rows)
        with threads.of_step(most_tokens(rows)):
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
        for slot, tenancy in zip(plan.freed_slots, plan.freed_slot_epochs, strict=True):
            self._slots.free(slot, tenancy)
            self._free(slot)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._restore(admission)
            if admission.pooling:
                self.context.pooling.admit(admission.slot)
            else:
                request = admission.slot, admission.sampling, admission.prompt_len
                self.context.sampling.admit(*request)
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
        self.context.grammars.free(slot)

    def _restore(self, admission: pb.Admission) -> None:
        """Restore the recurrent state of a cached prefix from the snapshot of its exact length."""
        recurrent = self.context.caches.recurrent
        if recurrent is None or not admission.num_cached:
            return
        recurrent.restore(admission.snapshot_id, admission.slot, admission.num_cached)

    def _change_tables(self, plan: pb.StepPlan) -> None:
        columns = plan.release_slots, plan.release_groups, plan.release_counts
        for slot, group, count in zip(*columns, strict=True):
            self._slots.give_back(slot, group, count)
        block_ids = np.array(plan.block_ids, dtype=np.int64)
        ends = np.cumsum(np.array(plan.extend_counts, dtype=np.int64))
        extended = plan.extend_slots, extend_groups(plan), plan.extend_counts
        for slot, group, count, end in zip(*extended, ends, strict=True):
            self._slots.extend(slot, block_ids[end - count : end], group)


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
    )
