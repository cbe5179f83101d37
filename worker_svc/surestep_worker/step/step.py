"""A step: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels.compilations import Compilations
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.table import StepOps
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2
from torch import Tensor

from surestep_worker.adapters.kernels import AdaptedRows
from surestep_worker.adapters.pool import AdapterPool
from surestep_worker.cache.caches import Caches
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters import DeviceDrafter, Drafter
from surestep_worker.drafters.inputs import DraftShape
from surestep_worker.drafters.ngram import RecentAnswers
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.layers.pooling import PoolingSums
from surestep_worker.models import Model

from .batch import Extras, Geometry, Inputs, StepColumns
from .buckets import EVERYTHING, StepSize, make_buckets, padding, step_size, warm_up_steps
from .drafting import Drafting
from .forward import ForwardPass, PassOutputs, SamplingPass, Shape
from .graphs import GraphKind, Graphs
from .heartbeat import Heartbeat, Phases
from .logprobs import LogprobPlan
from .order import Begun, DeviceFirst, Differences, Guidance, HostFirst, StepOrder
from .plan import NO_SNAPSHOTS, Rows, SnapshotRequests, read_snapshots, without_drafts
from .result import LaunchedStep, PendingStep, Results
from .sampling import SamplingTable
from .slots import SlotMemory, Slots
from .transfer import Download, upload

logger = logging.getLogger(__name__)


class RankContext(NamedTuple):
    """The parts that steps of one rank use."""

    model: Model
    caches: Caches
    slots: Slots
    sampling: SamplingTable
    grammars: GrammarTable
    pooling: PoolingSums
    drafter: Drafter | DeviceDrafter | None
    recent: RecentAnswers | None  # that the drafter may look into
    max_draft_tokens: int  # that the drafter proposes for a window
    most_drafts: int  # of a window, those that its grammar forces included
    tp: TensorParallel
    device: torch.device
    heartbeat: Heartbeat
    step_ops: StepOps
    use_graphs: bool  # capture steps, unless outputs are read freely
    max_step_tokens: int
    compilations: Compilations
    threads: Callable[[int], AbstractContextManager[None]]  # of a step of so many tokens
    adapters: AdapterPool | None  # None: requests have none

    @property
    def reads_freely(self) -> bool:
        """Return whether launches complete before they return: reading their outputs is free."""
        return self.step_ops.synchronous


class StepLauncher:
    """Launches the rows of plans. What happens in a step, in order, is in `launch` and `_run`."""

    def __init__(self, context: RankContext, ops: StepOps) -> None:
        self.context, self._ops = context, ops
        self._memory = SlotMemory(context.slots, context.device)
        state, tp, model, drafter = self._memory.state, context.tp, context.model, context.drafter
        self._sampling, self._phases = context.sampling, Phases(context.heartbeat)
        self._drafting = Drafting(
            drafter,
            ops,
            state,
            tp,
            vocab_size=model.config.vocab_size,
            max_proposed=context.max_draft_tokens,
            most_drafts=context.most_drafts,
            reads_freely=context.reads_freely,
        )
        self._guidance = Guidance(context.grammars, context.slots, state, tp)
        adapted = context.adapters.rows if context.adapters is not None else AdaptedRows()
        self._pass = ForwardPass(
            model, context.caches, ops, state, self._drafting, self._phases, adapted
        )
        self._sample = SamplingPass(model, context.pooling, tp, ops, state, self._phases)
        self._order = self._make_order()
        caches = context.caches
        self._graphs: Graphs | None = None  # before `prepare`, and where nothing is captured
        self._results = Results(
            context.slots, caches, self._drafting, self._order, tp.rank, self._missed_kind
        )

    def _make_order(self) -> StepOrder:
        if not self.context.reads_freely:
            return DeviceFirst(self._guidance, self._phases)
        self.context.slots.share(self._memory.state.tokens[:-1])
        return HostFirst(
            self._memory,
            self._sampling,
            self._drafting,
            self._guidance,
            self._phases,
            self._write,
        )

    def launch(self, plan: worker_pb2.StepPlan, rows: Rows) -> PendingStep:
        """Queue the rows of a plan on the device, after its differences went into the slots."""
        if plan.capture:
            self._capture_ordered(plan.capture)
        self._phases.begin()
        skipped = self._drafting.skips(plan.drafter_faults)
        drafting = without_drafts(rows) if skipped else rows
        launched = self._run(drafting, self._memory.differences(plan), self._requested(plan))
        skipped = skipped or launched.drafter_skipped
        return PendingStep(
            self._results, plan, launched._replace(rows=rows, drafter_skipped=skipped)
        )

    def _run(
        self, rows: Rows, differences: Differences, requested: SnapshotRequests
    ) -> LaunchedStep:
        """Queue rows: draft, forward, mask, sample, commit, and the download of what they did."""
        begun = self._order.begin(rows, differences)
        params = self._sampling.logprobs
        geometry = Geometry.of(begun.rows, self.context.slots, params.prompt, requested)
        logprobs = LogprobPlan.of(geometry, params) if params.wanted else None
        shape = self._shape(geometry, logprobs)
        inputs = self._inputs(begun, geometry, logprobs)
        sent, outputs = self._replay(inputs, geometry, rows) or self._queue(inputs, shape, begun)
        guided = self._order.guided(begun, outputs.drafts)
        packed = outputs.packed
        if packed is None:
            columns, extras = sent
            extras = guided.onto(extras, geometry, self.context.device)
            packed = self._sample(columns, outputs, extras, shape)
        return LaunchedStep(
            rows,
            requested,
            geometry,
            logprobs,
            guided,
            Download(packed),
            drafter_skipped=outputs.drafter_failed,
            drafter_faults=self._drafting.faults,
            timings=self._order.launched(),
            launched_ns=time.perf_counter_ns(),
        )

    def _shape(self, geometry: Geometry, logprobs: LogprobPlan | None) -> Shape:
        """Return which kernels a step runs that is launched for itself."""
        most_drafts = int(geometry.max_drafts.max(initial=0))
        most_behind = int(geometry.rows.catch_up.max(initial=0))
        flags = self._sampling.draw_flags(geometry.window_slot)
        return Shape(
            max_tokens=int(geometry.width.max(initial=0)),
            draft=DraftShape(most_drafts, most_behind, *flags),
            max_num_logprobs=logprobs.max_num_top if logprobs is not None else 0,
        )

    def _inputs(
        self, begun: Begun, geometry: Geometry, logprobs: LogprobPlan | None
    ) -> Inputs[HostColumn]:
        """Return what is sent to the device."""
        sampling, rows = self._sampling, begun.rows
        head = None
        if begun.drafted is None:
            draw = sampling.draw(rows.slot)
            head = self._drafting.head_inputs(rows.slot, rows.max_proposed, rows.catch_up, draw)
        columns = StepColumns.of(geometry, sampling, rows.max_proposed, head)
        extras: Extras[HostColumn] = Extras(
            differences=begun.differences,
            shaping=sampling.shaping(geometry.window_slot, geometry.position_window),
            scored=logprobs.scored if logprobs is not None else None,
            prompt_ids=logprobs.prompt_ids if logprobs is not None else None,
            pooled=geometry.pooled if len(geometry.pooled.token) else None,
            adapters=geometry.adapters,
        )
        return columns, extras

    def _queue(
        self, inputs: Inputs[HostColumn], shape: Shape, begun: Begun
    ) -> tuple[Inputs[Tensor], PassOutputs]:
        """Queue a pass kernel by kernel."""
        columns, extras = sent = upload(inputs, self.context.device)
        self._write(extras)
        return sent, self._pass(columns, shape, begun.drafted, extras.adapters)

    def _replay(
        self, inputs: Inputs[HostColumn], geometry: Geometry, rows: Rows
    ) -> tuple[Inputs[Tensor], PassOutputs] | None:
        """Replay a captured step, or the part of it that is captured; None if none fits."""
        columns, extras = inputs
        if self._graphs is None or extras.adapters is not None:  # which none is captured with
            return None
        whole = extras.plain and not self._guidance.concerns(rows)
        kind = self._graphs.find(step_size(columns, geometry), whole=whole)
        if kind is None:
            return None
        sent = self._graphs.send(kind, columns, extras)
        self._write(sent[1])
        self._phases.enter(pb.FORWARD)
        outputs = self._graphs.replay(kind)
        self._phases.enter(pb.SAMPLING)
        return sent, outputs

    def _write(self, extras: Extras) -> None:
        """Apply the differences of a plan to the slots on the device."""
        if extras.differences is not None:
            self._ops.write_runs(self._memory.words, extras.differences)

    def _requested(self, plan: worker_pb2.StepPlan) -> SnapshotRequests:
        recurrent, held = self.context.caches.recurrent, self.context.caches.held
        requested = read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)
        if held is not None and len(requested.id):
            ahead = self.context.slots.folded[requested.slot] < requested.length
            held.take(requested.id[ahead])  # an earlier plan has had the others taken
        return requested

    def open(self) -> None:
        """Begin an epoch."""
        self._drafting.faults = 0
        if self.context.recent is not None and self.context.tp.size > 1:
            self.context.recent.clear()  # another rank may be new, and must draft the same

    def leave(self, slot: int) -> None:
        """Keep the answer of a request that leaves its slot, for those that come after it."""
        if self.context.recent is not None:
            slots, known = self.context.slots, int(self._memory.state.known[slot])
            text = slots.tokens[slot, :known].numpy()
            self.context.recent.keep(slot, text, int(slots.prompt_len[slot]))

    # -- before serving, and captured steps ---------------------------------------------------

    def prepare(self) -> None:
        """Run every kernel on padding, so that it is compiled, and begin to capture steps."""
        if self.context.reads_freely:  # kernels of such devices are compiled beforehand
            return
        began, context = time.perf_counter(), self.context
        limits = context.max_step_tokens, context.max_draft_tokens
        has_head = context.model.has_head
        for rows, sampling in warm_up_steps(context.slots, *limits, has_head=has_head):
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
        """Capture the largest step, whose memory the others share; those follow between steps."""
        context, width = self.context, 1 + self.context.max_draft_tokens
        buckets = make_buckets(context.slots.num_slots, width, context.max_step_tokens)
        self._graphs = graphs = Graphs(buckets, self._padding, self._capture, context.device)
        graphs.warm_up(self._progress)
        self._capture_together(graphs, graphs.kinds()[0])
        self._progress()

    def _capture_ordered(self, number: int) -> None:
        if self._graphs is None:
            raise InvalidRequest("steps are not captured here", param="capture")
        self._capture_together(self._graphs, self._graphs.kind(number))

    def _capture_together(self, graphs: Graphs, kind: GraphKind) -> None:
        """Capture a kind on all ranks or on none: its collectives are captured with it. What is
        captured already is so on all."""
        if graphs.is_captured(kind):
            return
        if not (self._all(not graphs.has_failed(kind)) and self._all(graphs.capture(kind))):
            graphs.drop(kind)

    def _all(self, mine: bool) -> bool:
        """Return whether something is true on all ranks, which all ask."""
        tp = self.context.tp
        return int(tp.all_reduce(torch.tensor([int(mine)]))) == tp.size

    def _missed_kind(self) -> int:
        """Return the kind of step that the scheduler is asked to have captured; 0: none."""
        return self._graphs.due if self._graphs is not None else 0

    def _padding(self, bucket: StepSize) -> StepColumns[HostColumn]:
        return padding(
            bucket, self.context.slots.num_slots, has_draft_head=self._drafting.head is not None
        )

    def _capture(self, columns: StepColumns, kind: GraphKind) -> PassOutputs:
        """Queue what is captured of a kind of step, with as many drafts as its windows hold."""
        bucket, whole = kind
        draft = DraftShape(bucket.window - 1, bucket.longest, random=True, truncated=True)
        shape = Shape(bucket.longest, draft)
        outputs = self._pass(columns, shape)
        if not whole:
            return outputs
        return outputs._replace(packed=self._sample(columns, outputs, Extras(), shape))

    def _progress(self) -> None:
        self.context.heartbeat.progress(pb.WARMING_UP)

    @property
    def captured(self) -> tuple[int, int]:
        graphs = self._graphs
        return (graphs.num_captured, graphs.num_missed) if graphs is not None else (0, 0)

    @property
    def graph_bytes(self) -> int:
        return self._graphs.footprint if self._graphs is not None else 0

    def capture_next(self) -> None:
        """Capture one more kind, if there is one. A rank of a group waits for an order instead."""
        if self._graphs is not None and self.context.tp.size == 1:
            self._graphs.capture_next()

    def capture_missed(self) -> None:
        """Capture what steps have missed, on all ranks after equal steps."""
        graphs = self._graphs
        while graphs is not None and (kind := graphs.most_missed) is not None:
            self._capture_together(graphs, kind)
