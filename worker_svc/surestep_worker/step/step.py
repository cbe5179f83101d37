"""A step on a device: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from surestep_kernels.step.step_ops import StepOps
from surestep_kernels.step.write_runs import Runs
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_worker.drafters.inputs import DraftInputs, DraftShape, HeadInputs
from surestep_worker.inputs.buckets import Bucket, make_buckets
from surestep_worker.inputs.columns import (
    Extras,
    PassInputs,
    PooledColumns,
    StepColumns,
    need_of,
    padding,
)
from surestep_worker.inputs.download import Packed, Words
from surestep_worker.inputs.geometry import Geometry
from surestep_worker.inputs.logprob_plan import LogprobPlan
from surestep_worker.inputs.slot_memory import SlotMemory
from surestep_worker.inputs.upload import upload
from surestep_worker.inputs.warm_up import warm_up_steps
from surestep_worker.ledger.plan import (
    NO_SNAPSHOTS,
    IntArray,
    Rows,
    SnapshotRequests,
    read_snapshots,
    without_drafts,
)

from .drafting import Drafted, Drafting
from .forward import ForwardPass, PassOutputs, PassShape
from .graphs import Captured, GraphKind, Graphs, Queued
from .launched import Launched, PendingStep
from .phases import Phases
from .rank_context import RankContext
from .settling import PLAIN, Asked, Settling

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


class StepLauncher:
    """Runs the rows of plans; `launch` returns when everything is queued on the device."""

    def __init__(self, context: RankContext, ops: StepOps) -> None:
        """Raises InvalidRequest for a drafter that steps on a device cannot use."""
        self.context = context
        self._ops = ops
        self._memory = SlotMemory(context.slots, context.device)
        if context.synchronous:
            context.slots.share(self._memory.state.tokens[:-1])
        self._sampling = context.sampling
        self._drafting = Drafting(context, ops, self._memory.state)
        self._phases = Phases(context.heartbeat)
        self._pass = ForwardPass(context, ops, self._memory.state, self._drafting, self._phases)
        self._settle = Settling(context, ops, self._memory.state, self._phases)
        self._graphs: Graphs | None = None  # before `prepare`, and where nothing is captured

    def prepare(self) -> None:
        """Run, on padding, whatever may have to be compiled; begin to capture steps."""
        if self.context.synchronous:  # as devices are that run what is compiled beforehand
            return
        began, context = time.perf_counter(), self.context
        sizes, has_head = (
            (context.max_step_tokens, context.max_draft_tokens),
            context.model.has_head,
        )
        steps = warm_up_steps(context.slots, *sizes, has_head=has_head)
        for rows, sampling in steps:
            self._sampling.set_dummy(sampling)
            self._run(rows, self._memory.no_difference(), NO_SNAPSHOTS)
            self._progress()
        self._sampling.set_dummy(None)
        if context.use_graphs and has_head:
            self._begin_to_capture()
        seconds = time.perf_counter() - began
        logger.info("warmed up in %.1f s, %d shapes of step captured", seconds, self.captured[0])

    def _begin_to_capture(self) -> None:
        """The largest step: others share its memory, and are captured between steps.

        Ranks of a group capture everything at once, as a collective is captured by all or none.
        """
        context, width = self.context, 1 + self.context.max_draft_tokens
        buckets = make_buckets(context.slots.num_slots, width, context.max_step_tokens)
        self._graphs = graphs = Graphs(buckets, self._padding, self._queue, context.device)
        graphs.warm(self._progress)
        if context.tp.size == 1:
            graphs.capture_next()
            return
        for kind in graphs.kinds():
            succeeded = torch.tensor([int(graphs.capture(kind))])
            if int(context.tp.all_reduce(succeeded)) < context.tp.size:
                graphs.drop(kind)
            self._progress()

    def _padding(self, bucket: Bucket) -> StepColumns:
        return padding(
            bucket, self.context.slots.num_slots, has_draft_head=self._drafting.head is not None
        )

    def _progress(self) -> None:
        self.context.heartbeat.progress(pb.WARMING_UP)

    @property
    def captured(self) -> tuple[int, int]:
        """Kinds of step that are one launch; and how many steps were not, where there are any."""
        graphs = self._graphs
        return (graphs.num_captured, graphs.num_missed) if graphs is not None else (0, 0)

    @property
    def graph_bytes(self) -> int:
        """Memory of the device that captured steps will take, all of them; known when prepared."""
        return self._graphs.footprint if self._graphs is not None else 0

    @property
    def has_chore(self) -> bool:
        """Whether steps have wanted something that would make them faster. Any thread may ask."""
        return self._graphs is not None and self._graphs.is_due

    def do_chore(self) -> None:
        """Do a part of what makes steps faster, if any is left: between steps, or when idle."""
        if self._graphs is not None:
            self._graphs.capture_next()

    def do_wanted(self) -> None:
        """Do all that steps have wanted."""
        if self._graphs is not None:
            self._graphs.capture_wanted()

    def open(self) -> None:
        """Begin an epoch: nothing of an earlier one is left."""
        self._drafting.faults = 0

    def launch(self, plan: worker_pb2.StepPlan, rows: Rows) -> PendingStep:
        """Run the rows of a plan whose differences have been applied."""
        self._phases.begin()
        skipped = self._drafting.skips(plan.drafter_faults)
        asked = without_drafts(rows) if skipped else rows
        requested = self._requested(plan)
        ran = self._run(asked, self._memory.differences(plan), requested)
        launched = Launched(
            plan, rows, requested, ran.geometry, ran.logprobs, skipped or ran.failed,
            self._drafting.faults, self._timings(), time.perf_counter_ns(),
        )  # fmt: skip
        return PendingStep(self.context, ran.words, launched, self._drafting)

    def _timings(self) -> worker_pb2.Timings:
        """What is known when everything is launched."""
        timings = self._phases.timings()
        if self.context.synchronous:
            return timings
        spent = timings.prepare_us + timings.forward_us + timings.sample_us
        return worker_pb2.Timings(prepare_us=spent)

    def _run(self, rows: Rows, differences: Runs | None, requested: SnapshotRequests) -> _Ran:
        """Queue everything of a step."""
        drafted = None
        if self.context.synchronous:
            drafted, differences = self._draft(rows, differences), None
            rows = dataclasses.replace(rows, max_drafts=drafted.drafts.counts.long().numpy())
        wants = self._sampling.logprobs
        geometry = Geometry.of(rows, self.context.slots, wants.prompt, requested)
        logprobs = LogprobPlan.of(geometry, wants)
        sampling = self._sampling.of(geometry.window_slot, geometry.position_window)
        asked = Asked(sampling.random, sampling.truncated, logprobs.width if logprobs else 0)
        columns = StepColumns(
            self._inputs(geometry), geometry.position_window, sampling.draw, sampling.stops
        )
        extras = Extras(
            differences, sampling.biases, sampling.penalties, sampling.forbidden,
            logprobs.positions if logprobs is not None else None, PooledColumns.of(geometry.pooled),
        )  # fmt: skip
        captured = None
        if self._graphs is not None:
            plain = extras.plain and not asked.truncated
            captured = self._graphs.find(need_of(columns, geometry), plain=plain)
        if captured is None:
            shape = _shape(geometry, asked)
            outputs, facts = self._launch(columns, extras, shape, asked, drafted)
        else:
            outputs, facts = self._replay(captured, columns, extras, asked)
        return _Ran(Words(facts), geometry, logprobs, outputs.failed)

    def _draft(self, rows: Rows, differences: Runs | None) -> Drafted:
        """Before the room of windows is settled: nothing is computed for drafts that are not.

        The drafter sees the rows alone that draft or have to catch up.
        """
        state, sampling = self._memory.state, self._sampling
        self._write(upload(Extras(differences), self.context.device))
        if not rows.max_drafts.any() and not rows.catch_up.any():
            return self._drafting.nothing(len(rows))
        slot = torch.from_numpy(rows.slot)
        behind = (state.committed[slot] - state.drafter_len[slot]).numpy()
        catch_up, max_drafts = np.minimum(rows.catch_up, behind), rows.max_drafts
        busy = np.flatnonzero((max_drafts > 0) | (catch_up > 0))
        if not len(busy):
            return self._drafting.nothing(len(rows))
        told = rows.slot[busy], max_drafts[busy], catch_up[busy]
        shape = DraftShape(int(told[1].max()), int(told[2].max()), *sampling.asked(told[0]))
        columns: Any = (column.astype(np.int32) for column in told)
        sent = DraftInputs._make((*columns, self._head_inputs(*told)))
        drafted = self._pass.draft(upload(sent, self.context.device), shape)
        self._phases.enter(pb.PREPARING)
        return drafted.spread(torch.from_numpy(busy), len(rows))

    def _launch(
        self,
        columns: StepColumns,
        extras: Extras,
        shape: PassShape,
        asked: Asked,
        drafted: Drafted | None,
    ) -> tuple[PassOutputs, Packed]:
        """Kernel by kernel."""
        sent = upload(_Sent(columns, extras), self.context.device)
        self._write(sent.extras)
        outputs = self._pass(sent.columns.inputs, shape, drafted)
        return outputs, self._settle(sent.columns, outputs, sent.extras, asked)

    def _replay(
        self, captured: Captured, columns: StepColumns, extras: Extras, asked: Asked
    ) -> tuple[PassOutputs, Packed]:
        """At once, or all that comes before the logits."""
        assert self._graphs is not None
        sent = self._graphs.inbox.send(captured.layout, columns, extras)
        self._write(sent)
        self._phases.enter(pb.FORWARD)
        outputs, facts = captured.replay()
        self._phases.enter(pb.SAMPLING)
        return outputs, facts or self._settle(captured.layout.tree, outputs, sent, asked)

    def _write(self, sent: Extras) -> None:
        if sent.differences is not None:
            self._ops.write_runs(self._memory.words, sent.differences)

    def _queue(self, columns: StepColumns, kind: GraphKind) -> Queued:
        """What is captured of a step of some kind, with as many drafts as a window has room for."""
        bucket, whole = kind
        draft = DraftShape(bucket.window - 1, bucket.longest, random=True, truncated=not whole)
        outputs = self._pass(columns.inputs, PassShape(bucket.longest, draft))
        facts = self._settle(columns, outputs, Extras(), PLAIN) if whole else None
        return Queued(outputs, facts)

    def _requested(self, plan: worker_pb2.StepPlan) -> SnapshotRequests:
        recurrent = self.context.caches.recurrent
        return read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)

    def _inputs(self, geometry: Geometry) -> PassInputs:
        """Arrays."""
        rows, max_drafts = geometry.rows, geometry.max_drafts
        own = None
        if not self.context.synchronous:  # else drafts are there already
            own = self._head_inputs(np.asarray(rows.slot), max_drafts, np.asarray(rows.catch_up))
        return PassInputs(rows, max_drafts, geometry.hidden_index, own)

    def _head_inputs(
        self, slot: IntArray, max_drafts: IntArray, catch_up: IntArray
    ) -> HeadInputs | None:
        head = self._drafting.head
        if head is None:
            return None
        own: HeadInputs = head.inputs(slot, max_drafts, catch_up, self._sampling.draw(slot))
        return own


def _shape(geometry: Geometry, asked: Asked) -> PassShape:
    """That of a pass for this step alone."""
    most_drafts = int(geometry.max_drafts.max(initial=0))
    most_behind = int(np.asarray(geometry.rows.catch_up).max(initial=0))
    draft = DraftShape(most_drafts, most_behind, asked.random, asked.truncated)
    return PassShape(int(geometry.width.max(initial=0)), draft)
