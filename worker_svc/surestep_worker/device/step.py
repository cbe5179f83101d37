"""A step on a device: one upload, launches, one download; the host waits for none of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from surestep_kernels.choose import Chosen
from surestep_kernels.shape_logits import Positions, Shaping
from surestep_kernels.step_ops import StepOps
from surestep_kernels.write_runs import Runs
from surestep_proto import engine_pb2 as pb
from torch import Tensor

from surestep_worker.digest import row_fingerprints
from surestep_worker.gather import PooledTokens
from surestep_worker.parts import Parts
from surestep_worker.plan import NOTHING_ARMED, ArmedSnapshots, Rows, read_snapshots

from .buckets import Bucket, find_bucket, make_buckets
from .download import Words
from .drafting import DeviceDrafting
from .forward import ForwardPass, PassInputs, PassOutputs, PassShape
from .geometry import Geometry
from .graphs import Graphs
from .logprobs import LogprobPlan, ScoredPositions, score_positions
from .memory import SlotMemory
from .mtp import DraftShape
from .pending import DevicePending, Launched
from .upload import num_words, upload
from .warm_up import warm_up_steps
from .wishes import WishBook, Wishes

logger = logging.getLogger(__name__)


class _PooledColumns(NamedTuple):
    """See PooledTokens."""

    slot: Tensor  # i32[Q]
    row_slot: Tensor  # i32[K]
    num_tokens: Tensor  # i32[K]

    @classmethod
    def of(cls, pooled: PooledTokens) -> _PooledColumns | None:
        """Arrays; None when nothing is pooled."""
        if not len(pooled.token):
            return None
        columns: Any = pooled.slot, pooled.row_slot, pooled.num_tokens
        return cls._make(column.astype(np.int32) for column in columns)


class _Columns(NamedTuple):
    """All that a step needs from the host."""

    inputs: PassInputs  # first: a captured pass reads a copy of them
    position_window: Tensor  # i32[N]
    wishes: Wishes
    scored: ScoredPositions | None
    pooled: _PooledColumns | None
    differences: Runs | None  # of the slots, to be applied first


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
        self._graphs = Graphs(self._pass, parts.device)

    def prepare(self) -> None:
        """Run, on padding, whatever may have to be compiled; capture a pass for every bucket."""
        began, parts = time.perf_counter(), self.parts
        sizes, has_head = (parts.max_step_tokens, parts.max_draft_tokens), parts.model.has_head
        steps = warm_up_steps(parts.slots, *sizes, has_head=has_head)
        for rows, wishes in steps:
            self._wishes.imagine(wishes)
            self._run(rows, self._memory.no_difference(), NOTHING_ARMED)
            parts.heartbeat.progress(pb.WARMING_UP)
        self._wishes.imagine(None)
        if parts.use_graphs and has_head:
            self._capture()
        seconds, shapes = time.perf_counter() - began, len(self._graphs.buckets)
        logger.info("compiled kernels and captured %d shapes of step in %.1f s", shapes, seconds)

    def _capture(self) -> None:
        nobody, width = Rows.none(), 1 + self.parts.max_draft_tokens
        for bucket in make_buckets(self.parts.slots.num_slots, width):
            geometry = self._geometry(nobody, NOTHING_ARMED, bucket)
            sent = upload(self._inputs(geometry, bucket), self.parts.device)
            draft = DraftShape(bucket.window - 1, bucket.window, random=True, truncated=True)
            self._graphs.capture(bucket, sent, PassShape(bucket.window, draft))
            self.parts.heartbeat.progress(pb.WARMING_UP)

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
        parts, catches_up = self.parts, self._drafting.mtp is not None
        bucket = find_bucket(rows, self._graphs.buckets, catches_up=catches_up)
        geometry = self._geometry(rows, armed, bucket)
        logprobs = LogprobPlan.of(geometry, parts.sampling.logprobs)
        wishes = self._wishes.of(geometry.window_slot, geometry.position_window)
        scored = logprobs.positions if logprobs is not None else None
        inputs = self._inputs(geometry, bucket)
        pooled = _PooledColumns.of(geometry.pooled)
        host = _Columns(inputs, geometry.position_window, wishes, scored, pooled, differences)
        sent, words = upload(host, parts.device)
        if sent.differences is not None:
            self._ops.write_runs(self._memory.words, sent.differences)
        if bucket is None:
            outputs = self._pass(sent.inputs, _shape(geometry, wishes))
        else:
            parts.heartbeat.enter(pb.FORWARD)
            outputs = self._graphs.replay(bucket, words[: num_words(inputs)])
        parts.heartbeat.enter(pb.SAMPLING)
        return _Ran(self._sample(sent, outputs, logprobs), geometry, logprobs, outputs.failed)

    def _armed(self, plan: pb.StepPlan) -> ArmedSnapshots:
        recurrent = self.parts.caches.recurrent
        return read_snapshots(plan, recurrent.num_snapshots if recurrent is not None else 0)

    def _geometry(self, rows: Rows, armed: ArmedSnapshots, bucket: Bucket | None) -> Geometry:
        wants_prompt = self.parts.sampling.logprobs.prompt.numpy()
        return Geometry.of(rows, self.parts.slots, wants_prompt, armed, bucket)

    def _inputs(self, geometry: Geometry, bucket: Bucket | None) -> PassInputs:
        """Arrays."""
        rows, mtp = geometry.rows, self._drafting.mtp
        if mtp is None:
            return PassInputs(rows, geometry.k_cap, geometry.hidden_index, None)
        slot, catch_up = np.asarray(rows.slot), np.asarray(rows.catch_up)
        room = catch_up if bucket is None else np.full(bucket.rows, bucket.window)
        own = mtp.inputs(slot, geometry.k_cap, room, self._wishes.draw(slot))
        return PassInputs(rows, geometry.k_cap, geometry.hidden_index, own)

    def _sample(self, sent: _Columns, outputs: PassOutputs, logprobs: LogprobPlan | None) -> Words:
        """Logits, choice, commit, and the copy of what is reported."""
        num_pooled = len(sent.pooled.slot) if sent.pooled is not None else 0
        scored, pooled = outputs.hidden.split((len(outputs.hidden) - num_pooled, num_pooled))
        logits = self.parts.model.logits(scored).float() if len(scored) else scored
        raw = logits.clone() if logprobs is not None else logits
        chosen = self._choose(sent, outputs, logits)
        report = self._ops.commit_step(
            outputs.rows, outputs.drafts, chosen, sent.wishes.stops, self._memory.state
        )
        scores = () if logprobs is None or sent.scored is None else score_positions(
            raw, chosen.ids, sent.scored, logprobs.width
        )  # fmt: skip
        vectors = self._pool(sent.pooled, pooled)
        facts = report, outputs.error, _fingerprint(outputs), outputs.non_finite, vectors
        return Words([*facts, *scores])

    def _pool(self, columns: _PooledColumns | None, hidden: Tensor) -> Tensor:
        """Vectors f32[K, H] of the rows that complete one."""
        if columns is None:
            return torch.empty(0, 0, device=hidden.device)
        slot, row_slot, num_tokens = (column.long() for column in columns)
        self.parts.pooling.add(slot, hidden)
        return self.parts.pooling.mean(row_slot, num_tokens)

    def _choose(self, sent: _Columns, outputs: PassOutputs, logits: Tensor) -> Chosen:
        """Rank 0 decides for all."""
        wishes, window, inputs = sent.wishes, sent.position_window, outputs.inputs
        z = logits[: len(window)]
        if not len(window):
            nothing = torch.zeros(0, dtype=torch.int32, device=z.device)
            return Chosen(nothing, nothing)
        shaping = Shaping(wishes.biases, wishes.penalties, wishes.forbidden)
        if shaping != Shaping():
            slot = inputs.slots[outputs.rows.position_row.long()].int()
            where = Positions(window, slot, inputs.lengths, self._memory.state.tokens)
            self._ops.shape_logits(z, where, shaping)
        chosen = self._ops.choose(
            z, window, inputs.lengths, wishes.draw, random=wishes.random, truncated=wishes.truncated
        )
        return Chosen._make(self.parts.tp.broadcast(column) for column in chosen)


def _without_drafts(rows: Rows) -> Rows:
    nothing = np.zeros_like(rows.k_cap)
    return dataclasses.replace(rows, k_cap=nothing, catch_up=nothing)


def _shape(geometry: Geometry, wishes: Wishes) -> PassShape:
    """That of a pass for this step alone."""
    most_drafts = int(geometry.k_cap.max(initial=0))
    most_behind = int(np.asarray(geometry.rows.catch_up).max(initial=0))
    draft = DraftShape(most_drafts, most_behind, wishes.random, wishes.truncated)
    return PassShape(int(geometry.width.max(initial=0)), draft)


def _fingerprint(outputs: PassOutputs) -> Tensor:
    """Of the hidden states [N + P, H] that are no padding: i64[1]."""
    rows, num_positions = outputs.rows, len(outputs.inputs.lengths)
    sums = row_fingerprints(outputs.hidden)
    real = rows.position_offset < outputs.inputs.valid[rows.position_row.long()]
    windows = torch.where(real, sums[:num_positions], 0).sum()
    return (windows + sums[num_positions:].sum()).reshape(1)
