"""A step on a device: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import NamedTuple

import numpy as np
import torch
from surestep_kernels.step_ops import StepOps
from surestep_kernels.write_runs import Runs
from surestep_proto import engine_pb2 as pb

from surestep_worker.parts import Parts
from surestep_worker.plan import NOTHING_ARMED, ArmedSnapshots, Rows, read_snapshots

from .buckets import Bucket, make_buckets
from .columns import Extras, PooledColumns, StepColumns, need_of, padding
from .download import Packed, Words
from .drafting import DeviceDrafting
from .forward import ForwardPass, PassInputs, PassOutputs, PassShape
from .geometry import Geometry
from .graphs import Captured, Graphs, Kind, Queued
from .logprobs import LogprobPlan
from .memory import SlotMemory
from .mtp import DraftShape
from .pending import DevicePending, Launched
from .settling import PLAIN, Asked, Settling
from .upload import upload
from .warm_up import warm_up_steps
from .wishes import WishBook

logger = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """Of a step that is launched kernel by kernel."""

    columns: StepColumns
    extras: Extras


class _Ran(NamedTuple):
    """What a step that is queued leaves to the host."""

    words: Words
    geometry: Geometry
    logprobs: LogprobPlan | None
    failed: bool  # the drafter did


class DeviceStep:
    """See Execution. `launch` returns when everything is queued on the device."""

    def __init__(self, parts: Parts, ops: StepOps) -> None:
        """Raises InvalidRequest for a drafter that steps on a device cannot use."""
        self.parts = parts
        self._ops = ops
        self._memory = SlotMemory(parts.slots, parts.device)
        self._wishes = WishBook(parts.slots.num_slots, parts.model.config.vocab_size)
        self._drafting = DeviceDrafting(parts, ops, self._memory.state)
        self._pass = ForwardPass(parts, ops, self._memory.state, self._drafting)
        self._settle = Settling(parts, ops, self._memory.state)
        self._graphs: Graphs | None = None  # before `prepare`, and where nothing is captured

    def prepare(self) -> None:
        """Run, on padding, whatever may have to be compiled; begin to capture steps."""
        began, parts = time.perf_counter(), self.parts
        sizes, has_head = (parts.max_step_tokens, parts.max_draft_tokens), parts.model.has_head
        steps = warm_up_steps(parts.slots, *sizes, has_head=has_head)
        for rows, wishes in steps:
            self._wishes.imagine(wishes)
            self._run(rows, self._memory.no_difference(), NOTHING_ARMED)
            self._progress()
        self._wishes.imagine(None)
        if parts.use_graphs and has_head:
            self._begin_to_capture()
        seconds = time.perf_counter() - began
        logger.info("warmed up in %.1f s, %d shapes of step captured", seconds, self.captured[0])

    def _begin_to_capture(self) -> None:
        """The largest step: others share its memory, and are captured between steps.

        Ranks of a group capture everything at once, as a collective is captured by all or none.
        """
        parts, width = self.parts, 1 + self.parts.max_draft_tokens
        buckets = make_buckets(parts.slots.num_slots, width, parts.max_step_tokens)
        self._graphs = graphs = Graphs(buckets, self._padding, self._queue, parts.device)
        graphs.warm(self._progress)
        if parts.tp.size == 1:
            graphs.capture_next()
            return
        for kind in graphs.kinds():
            succeeded = torch.tensor([int(graphs.capture(kind))])
            if int(parts.tp.all_reduce(succeeded)) < parts.tp.size:
                graphs.drop(kind)
            self._progress()

    def _padding(self, bucket: Bucket) -> StepColumns:
        return padding(bucket, self.parts.slots.num_slots, has_mtp=self._drafting.mtp is not None)

    def _progress(self) -> None:
        self.parts.heartbeat.progress(pb.WARMING_UP)

    @property
    def captured(self) -> tuple[int, int]:
        """See Execution."""
        graphs = self._graphs
        return (graphs.num_captured, graphs.num_missed) if graphs is not None else (0, 0)

    @property
    def graph_bytes(self) -> int:
        """See Execution."""
        return self._graphs.footprint if self._graphs is not None else 0

    @property
    def has_chore(self) -> bool:
        """See Execution."""
        return self._graphs is not None and self._graphs.is_due

    def do_chore(self) -> None:
        """See Execution."""
        if self._graphs is not None:
            self._graphs.capture_next()

    def do_wanted(self) -> None:
        """See Execution."""
        if self._graphs is not None:
            self._graphs.capture_wanted()

    def open(self) -> None:
        """See Execution."""
        self._drafting.faults = 0

    def launch(self, plan: pb.StepPlan, rows: Rows) -> DevicePending:
        """See Execution."""
        began = time.perf_counter_ns()
        for admission in plan.admissions:
            if not admission.pooling:
                self._wishes.admit(admission)
        skipped = self._drafting.skips(plan.drafter_faults)
        asked = _without_drafts(rows) if skipped else rows
        armed = self._armed(plan)
        ran = self._run(asked, self._memory.differences(plan), armed)
        launched = Launched(
            plan, rows, armed, ran.geometry, ran.logprobs,
            skipped or ran.failed, self._drafting.faults, began, time.perf_counter_ns(),
        )  # fmt: skip
        return DevicePending(self.parts, ran.words, launched, self._drafting)

    def _run(self, rows: Rows, differences: Runs | None, armed: ArmedSnapshots) -> _Ran:
        """Queue everything of a step."""
        wants = self.parts.sampling.logprobs
        geometry = Geometry.of(rows, self.parts.slots, wants.prompt.numpy(), armed)
        logprobs = LogprobPlan.of(geometry, wants)
        wishes = self._wishes.of(geometry.window_slot, geometry.position_window)
        asked = Asked(wishes.random, wishes.truncated, logprobs.width if logprobs else 0)
        columns = StepColumns(
            self._inputs(geometry), geometry.position_window, wishes.draw, wishes.stops
        )
        extras = Extras(
            differences, wishes.biases, wishes.penalties, wishes.forbidden,
            logprobs.positions if logprobs is not None else None, PooledColumns.of(geometry.pooled),
        )  # fmt: skip
        captured = None
        if self._graphs is not None:
            plain = extras.plain and not asked.truncated
            captured = self._graphs.find(need_of(columns, geometry), plain=plain)
        if captured is None:
            outputs, facts = self._launch(columns, extras, _shape(geometry, asked), asked)
        else:
            outputs, facts = self._replay(captured, columns, extras, asked)
        return _Ran(Words(facts), geometry, logprobs, outputs.failed)

    def _launch(
        self, columns: StepColumns, extras: Extras, shape: PassShape, asked: Asked
    ) -> tuple[PassOutputs, Packed]:
        """Kernel by kernel."""
        sent = upload(_Sent(columns, extras), self.parts.device)
        self._write(sent.extras)
        outputs = self._pass(sent.columns.inputs, shape)
        self.parts.heartbeat.enter(pb.SAMPLING)
        return outputs, self._settle(sent.columns, outputs, sent.extras, asked)

    def _replay(
        self, captured: Captured, columns: StepColumns, extras: Extras, asked: Asked
    ) -> tuple[PassOutputs, Packed]:
        """At once, or all that comes before the logits."""
        assert self._graphs is not None
        sent = self._graphs.inbox.send(captured.layout, columns, extras)
        self._write(sent)
        self.parts.heartbeat.enter(pb.FORWARD)
        outputs, facts = captured.replay()
        self.parts.heartbeat.enter(pb.SAMPLING)
        return outputs, facts or self._settle(captured.layout.tree, outputs, sent, asked)

    def _write(self, sent: Extras) -> None:
        if sent.differences is not None:
            self._ops.write_runs(self._memory.words, sent.differences)

    def _queue(self, columns: StepColumns, kind: Kind) -> Queued:
        """What is captured of a step of some kind, with as many drafts as a window has room for."""
        bucket, whole = kind
        draft = DraftShape(bucket.window - 1, bucket.longest, random=True, truncated=not whole)
        outputs = self._pass(columns.inputs, PassShape(bucket.longest, draft))
        facts = self._settle(columns, outputs, Extras(), PLAIN) if whole else None
        return Queued(outputs, facts)

    def _armed(self, plan: pb.StepPlan) -> ArmedSnapshots:
        recurrent = self.parts.caches.recurrent
        return read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)

    def _inputs(self, geometry: Geometry) -> PassInputs:
        """Arrays."""
        rows, mtp = geometry.rows, self._drafting.mtp
        if mtp is None:
            return PassInputs(rows, geometry.k_cap, geometry.hidden_index, None)
        slot, catch_up = np.asarray(rows.slot), np.asarray(rows.catch_up)
        own = mtp.inputs(slot, geometry.k_cap, catch_up, self._wishes.draw(slot))
        return PassInputs(rows, geometry.k_cap, geometry.hidden_index, own)


def _without_drafts(rows: Rows) -> Rows:
    nothing = np.zeros_like(rows.max_drafts)
    return dataclasses.replace(rows, max_drafts=nothing, catch_up=nothing)


def _shape(geometry: Geometry, asked: Asked) -> PassShape:
    """That of a pass for this step alone."""
    most_drafts = int(geometry.k_cap.max(initial=0))
    most_behind = int(np.asarray(geometry.rows.catch_up).max(initial=0))
    draft = DraftShape(most_drafts, most_behind, asked.random, asked.truncated)
    return PassShape(int(geometry.width.max(initial=0)), draft)
