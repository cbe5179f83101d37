"""A step: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import NamedTuple

import numpy as np
import torch
from surestep_common.invariants import Int32Array, IntArray
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.table import StepOps
from surestep_kernels.write_runs import Runs
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_worker.drafters.inputs import DraftInputs, DraftShape, HeadInputs
from surestep_worker.host.phases import Phases

from .batch import Extras, Geometry, LaunchInputs, PassInputs, PooledColumns, StepColumns
from .buckets import EVERYTHING, Bucket, make_buckets, padding, step_size, warm_up_steps
from .context import RankContext
from .drafting import Drafted, Drafting
from .forward import ANY_CHOICE, ForwardPass, PassOutputs, PassShape, SamplingPass, SamplingShape
from .graphs import CapturedStep, GraphKind, Graphs, Queued
from .guidance import Guidance, Guided
from .logprobs import LogprobPlan
from .plan import NO_SNAPSHOTS, Rows, SnapshotRequests, read_snapshots, without_drafts
from .result import LaunchedStep, PendingStep
from .slots import SlotMemory
from .transfer import Download, Packed, upload

logger = logging.getLogger(__name__)


class _QueuedStep(NamedTuple):
    """What the host knows of a step once it is queued on the device."""

    download: Download
    geometry: Geometry
    logprobs: LogprobPlan | None
    drafter_failed: bool
    guided: Guided


class _Launched(NamedTuple):
    columns: StepColumns
    extras: Extras
    outputs: PassOutputs
    packed: Packed | None  # None: what follows the pass is not queued yet


class StepLauncher:
    """Launches the rows of plans. Runner has the same methods, and says what they do."""

    def __init__(self, context: RankContext, ops: StepOps) -> None:
        """Raise InvalidRequest for a drafter that cannot draft on the device."""
        self.context = context
        self._ops = ops
        self._memory = SlotMemory(context.slots, context.device)
        if context.synchronous:
            context.slots.share(self._memory.state.tokens[:-1])
        self._sampling = context.sampling
        self._drafting = Drafting(context, ops, self._memory.state)
        self._guidance = Guidance(context, self._memory.state)
        self._phases = Phases(context.heartbeat)
        self._pass = ForwardPass(context, ops, self._memory.state, self._drafting, self._phases)
        self._sample = SamplingPass(context, ops, self._memory.state, self._phases)
        self._graphs: Graphs | None = None  # before `prepare`, and where nothing is captured

    def prepare(self) -> None:
        """Run every kernel on padding, so that it is compiled, and begin to capture steps."""
        if self.context.synchronous:  # kernels of such devices are compiled beforehand
            return
        began, context = time.perf_counter(), self.context
        limits = context.max_step_tokens, context.max_draft_tokens
        has_head = context.model.has_head
        steps = warm_up_steps(context.slots, *limits, has_head=has_head)
        for rows, sampling in steps:
            self._sampling.set_dummy(sampling)
            guides = sampling is EVERYTHING
            self._guidance.set_dummy(context.model.config.vocab_size if guides else None)
            self._run(rows, self._memory.no_difference(), NO_SNAPSHOTS)
            self._progress()
        self._sampling.set_dummy(None)
        self._guidance.set_dummy(None)
        if context.use_graphs and has_head:
            self._begin_to_capture()
        seconds = time.perf_counter() - began
        logger.info("warmed up in %.1f s, %d shapes of step captured", seconds, self.captured[0])

    def _begin_to_capture(self) -> None:
        """Capture the largest step, whose memory the others share; those follow between steps.

        Ranks of a group capture everything now, as a collective is captured by all or none.
        """
        context, width = self.context, 1 + self.context.max_draft_tokens
        buckets = make_buckets(context.slots.num_slots, width, context.max_step_tokens)
        self._graphs = graphs = Graphs(buckets, self._padding, self._queue, context.device)
        graphs.warm_up(self._progress)
        if context.tp.size == 1:
            graphs.capture_next()
            return
        for kind in graphs.kinds():
            succeeded = torch.tensor([int(graphs.capture(kind))])
            if int(context.tp.all_reduce(succeeded)) < context.tp.size:
                graphs.drop(kind)
            self._progress()

    def _padding(self, bucket: Bucket) -> StepColumns[HostColumn]:
        return padding(
            bucket, self.context.slots.num_slots, has_draft_head=self._drafting.head is not None
        )

    def _progress(self) -> None:
        self.context.heartbeat.progress(pb.WARMING_UP)

    @property
    def captured(self) -> tuple[int, int]:
        graphs = self._graphs
        return (graphs.num_captured, graphs.num_missed) if graphs is not None else (0, 0)

    @property
    def graph_bytes(self) -> int:
        return self._graphs.footprint if self._graphs is not None else 0

    @property
    def capture_is_due(self) -> bool:
        return self._graphs is not None and self._graphs.is_due

    def capture_next(self) -> None:
        if self._graphs is not None:
            self._graphs.capture_next()

    def capture_missed(self) -> None:
        if self._graphs is not None:
            self._graphs.capture_missed()

    def open(self) -> None:
        self._drafting.faults = 0

    def launch(self, plan: worker_pb2.StepPlan, rows: Rows) -> PendingStep:
        """Queue the rows of a plan on the device, after its differences went into the slots."""
        self._phases.begin()
        skipped = self._drafting.skips(plan.drafter_faults)
        drafting = without_drafts(rows) if skipped else rows
        requested = self._requested(plan)
        queued = self._run(drafting, self._memory.differences(plan), requested)
        launched = LaunchedStep(
            plan, rows, requested, queued.geometry, queued.logprobs,
            skipped or queued.drafter_failed,
            self._drafting.faults, queued.guided, self._timings(), time.perf_counter_ns(),
        )  # fmt: skip
        return PendingStep(self.context, queued.download, launched, self._drafting)

    def _timings(self) -> worker_pb2.Timings:
        timings = self._phases.timings()
        if self.context.synchronous:
            return timings
        spent = timings.prepare_us + timings.forward_us + timings.sample_us
        return worker_pb2.Timings(prepare_us=spent)

    def _run(
        self, rows: Rows, differences: Runs[Int32Array] | None, requested: SnapshotRequests
    ) -> _QueuedStep:
        drafted = guided = None
        if self.context.synchronous:
            drafted, differences = self._draft(rows, differences), None
            drafts, guided = self._guidance.settle(rows, drafted.drafts)
            drafted = drafted._replace(drafts=drafts)
            guided = guided.with_lookups(drafts.counts, drafted.looked_up)
            rows = dataclasses.replace(rows, max_drafts=drafted.drafts.counts.long().numpy())
        params = self._sampling.logprobs
        geometry = Geometry.of(rows, self.context.slots, params.prompt, requested)
        logprobs = LogprobPlan.of(geometry, params)
        sampling = self._sampling.batch(geometry.window_slot, geometry.position_window)
        num_logprobs = logprobs.max_num_top if logprobs is not None else 0
        shape = SamplingShape(sampling.random, sampling.truncated, num_logprobs)
        inputs = self._inputs(rows, geometry)
        columns = StepColumns(inputs, geometry.position_window, sampling.draw, sampling.stops)
        extras: Extras[HostColumn] = Extras(
            differences, sampling.biases, sampling.penalties, sampling.forbidden,
            logprobs.positions if logprobs is not None else None, PooledColumns.of(geometry.pooled),
        )  # fmt: skip
        captured = None
        if self._graphs is not None:
            whole = extras.plain and not self._guidance.concerns(rows)
            captured = self._graphs.find(step_size(columns, geometry), whole=whole)
        if captured is None:
            pass_shape = PassShape.of(geometry, sampling)
            launched = self._launch(LaunchInputs(columns, extras), pass_shape, drafted)
        else:
            launched = self._replay(captured, columns, extras)
        guided = guided or self._guidance.follow(rows, launched.outputs.drafts)
        outputs, packed = launched.outputs, launched.packed
        if packed is None:
            uploaded = guided.onto(launched.extras, geometry, self.context.device)
            packed = self._sample(launched.columns, outputs, uploaded, shape)
        return _QueuedStep(Download(packed), geometry, logprobs, outputs.drafter_failed, guided)

    def _draft(self, rows: Rows, differences: Runs[Int32Array] | None) -> Drafted:
        """Draft before the windows get their room, so that missing drafts cost no computation.

        The drafter sees only the rows that draft or have to catch up.
        """
        state, sampling = self._memory.state, self._sampling
        extras: Extras[HostColumn] = Extras(differences)
        self._write(upload(extras, self.context.device))
        room = rows.max_drafts if self._drafting.looks_up else rows.max_proposed
        busy = np.flatnonzero((room > 0) | (rows.catch_up > 0))
        if not len(busy):
            return self._drafting.nothing(len(rows))
        some, line = rows.take(busy), torch.from_numpy(rows.slot[busy])
        slot, max_drafts = some.slot, some.max_proposed
        behind = (state.committed[line] - state.drafter_len[line]).numpy()
        catch_up = np.minimum(some.catch_up, behind)
        shape = DraftShape(int(max_drafts.max()), int(catch_up.max()), *sampling.draw_flags(slot))
        head = self._head_inputs(slot, max_drafts, catch_up)
        inputs: DraftInputs[HostColumn] = DraftInputs(
            slot.astype(np.int32), max_drafts.astype(np.int32), room[busy].astype(np.int32),
            catch_up.astype(np.int32), head,
        )  # fmt: skip
        drafted = self._pass.draft(upload(inputs, self.context.device), shape)
        self._phases.enter(pb.PREPARING)
        return drafted.spread(torch.from_numpy(busy), len(rows))

    def _launch(
        self,
        inputs: LaunchInputs[HostColumn],
        pass_shape: PassShape,
        drafted: Drafted | None,
    ) -> _Launched:
        columns, extras = upload(inputs, self.context.device)
        self._write(extras)
        outputs = self._pass(columns.inputs, pass_shape, drafted)
        return _Launched(columns, extras, outputs, None)

    def _replay(
        self,
        captured: CapturedStep,
        columns: StepColumns[HostColumn],
        extras: Extras[HostColumn],
    ) -> _Launched:
        """Replay a captured step, or the part of it that is captured."""
        assert self._graphs is not None
        uploaded = self._graphs.input_buffer.send(captured.layout, columns, extras)
        self._write(uploaded)
        self._phases.enter(pb.FORWARD)
        outputs, packed = captured.replay()
        self._phases.enter(pb.SAMPLING)
        return _Launched(captured.layout.columns, uploaded, outputs, packed)

    def _write(self, extras: Extras) -> None:
        """Apply the differences of a plan to the slots on the device."""
        if extras.differences is not None:
            self._ops.write_runs(self._memory.words, extras.differences)

    def _queue(self, columns: StepColumns, kind: GraphKind) -> Queued:
        """Queue what is captured of a kind of step, with as many drafts as its windows hold."""
        bucket, whole = kind
        draft = DraftShape(bucket.window - 1, bucket.longest, random=True, truncated=True)
        outputs = self._pass(columns.inputs, PassShape(bucket.longest, draft))
        packed = self._sample(columns, outputs, Extras(), ANY_CHOICE) if whole else None
        return Queued(outputs, packed)

    def _requested(self, plan: worker_pb2.StepPlan) -> SnapshotRequests:
        recurrent = self.context.caches.recurrent
        return read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)

    def _inputs(self, rows: Rows, geometry: Geometry) -> PassInputs[HostColumn]:
        head = None
        if not self.context.synchronous:  # else the drafts have been made
            head = self._head_inputs(rows.slot, rows.max_proposed, rows.catch_up)
        most = rows.max_proposed.astype(np.int32)
        return PassInputs(geometry.rows, most, geometry.hidden_index, head)

    def _head_inputs(
        self, slot: IntArray, max_drafts: IntArray, catch_up: IntArray
    ) -> HeadInputs[HostColumn] | None:
        head = self._drafting.head
        if head is None:
            return None
        return head.inputs(slot, max_drafts, catch_up, self._sampling.draw(slot))
