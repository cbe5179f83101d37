"""What the host does before and behind the pass of a step: one order for each kind of device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from surestep_common.invariants import Int32Array
from surestep_kernels.slot_state import DraftIds
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.write_runs import Runs
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2

from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.host.phases import Phases

from .batch import Extras
from .drafting import Drafted, Drafting
from .forward import ForwardPass
from .guidance import Guidance, Guided
from .plan import Rows
from .sampling import SamplingTable
from .slots import SlotMemory
from .transfer import upload

Differences = Runs[Int32Array] | None


class Begun(NamedTuple):
    """A step before its pass."""

    rows: Rows  # max_drafts: the room of their windows
    differences: Differences  # of the slots, not written yet
    drafted: Drafted | None  # None: the pass drafts
    guided: Guided | None  # None: known when the pass has drafted


class StepOrder(Protocol):
    """The host's part of a step."""

    def begin(self, rows: Rows, differences: Differences) -> Begun:
        """Return what is known of a step before its pass."""
        ...

    def guided(self, begun: Begun, drafts: DraftIds) -> Guided:
        """Return what grammars make of the step, given the drafts that its pass was queued with."""
        ...

    def launched(self) -> worker_pb2.Timings:
        """Return the timings that are known when everything is queued."""
        ...

    def finished(self, timings: worker_pb2.Timings, launched_ns: int, read_ns: int) -> None:
        """Add the timings known at the end of a step, launched and read at these instants."""
        ...


class HostFirst:
    """Drafts first, then gives windows the room that their drafts take, and no more.

    For devices whose launches are complete when they return: reading their outputs is free there,
    and missing drafts cost no computation.
    """

    def __init__(
        self,
        memory: SlotMemory,
        sampling: SamplingTable,
        drafting: Drafting,
        guidance: Guidance,
        forward: ForwardPass,
        phases: Phases,
        write: Callable[[Extras], None],
    ) -> None:
        """`write` applies the uploaded differences of a plan to the slots."""
        self._state, self._sampling, self._drafting = memory.state, sampling, drafting
        self._guidance, self._pass, self._phases, self._write = guidance, forward, phases, write

    def begin(self, rows: Rows, differences: Differences) -> Begun:
        """Draft, and settle the windows of rows with grammars."""
        extras: Extras[HostColumn] = Extras(differences)
        self._write(upload(extras, self._state.tokens.device))
        drafted = self._draft(rows)
        drafts, guided = self._guidance.settle(rows, drafted.drafts)
        guided = guided.with_lookups(drafts.counts, drafted.looked_up)
        rows = dataclasses.replace(rows, max_drafts=drafts.counts.long().numpy())
        return Begun(rows, None, drafted._replace(drafts=drafts), guided)

    def guided(self, begun: Begun, drafts: DraftIds) -> Guided:
        """Return what was settled."""
        assert begun.guided is not None
        return begun.guided

    def _draft(self, rows: Rows) -> Drafted:
        """Draft for the rows that draft or have to catch up; the drafter sees no others."""
        state, sampling = self._state, self._sampling
        room = rows.max_drafts if self._drafting.looks_up else rows.max_proposed
        busy = np.flatnonzero((room > 0) | (rows.catch_up > 0))
        if not len(busy):
            return self._drafting.nothing(len(rows))
        some, line = rows.take(busy), torch.from_numpy(rows.slot[busy])
        slot, max_drafts = some.slot, some.max_proposed
        behind = (state.committed[line] - state.drafter_len[line]).numpy()
        catch_up = np.minimum(some.catch_up, behind)
        shape = DraftShape(int(max_drafts.max()), int(catch_up.max()), *sampling.draw_flags(slot))
        head = self._drafting.head_inputs(slot, max_drafts, catch_up, sampling.draw(slot))
        columns = slot, max_drafts, room[busy], catch_up
        inputs: DraftInputs[HostColumn] = DraftInputs._make(
            (*(column.astype(np.int32) for column in columns), head)
        )
        drafted = self._pass.draft(upload(inputs, state.tokens.device), shape)
        self._phases.enter(pb.PREPARING)
        return drafted.spread(torch.from_numpy(busy), len(rows))

    def launched(self) -> worker_pb2.Timings:
        """Return the time that each phase took."""
        return self._phases.timings()

    def finished(self, timings: worker_pb2.Timings, launched_ns: int, read_ns: int) -> None:
        """Count reading the result as sampling."""
        timings.sample_us += (time.perf_counter_ns() - read_ns) // 1000


class DeviceFirst:
    """Queues everything without waiting; windows have room for all drafts that they may have.

    Grammars fetch the drafts of their rows while the pass runs.
    """

    def __init__(self, guidance: Guidance, phases: Phases) -> None:
        self._guidance, self._phases = guidance, phases

    def begin(self, rows: Rows, differences: Differences) -> Begun:
        """Leave everything to the pass."""
        return Begun(rows, differences, None, None)

    def guided(self, begun: Begun, drafts: DraftIds) -> Guided:
        """Mask the windows as they are. Waits for the device if any row has a grammar."""
        return self._guidance.follow(begun.rows, drafts)

    def launched(self) -> worker_pb2.Timings:
        """Return the time that it took to queue the step."""
        timings = self._phases.timings()
        spent = timings.prepare_us + timings.forward_us + timings.sample_us
        return worker_pb2.Timings(prepare_us=spent)

    def finished(self, timings: worker_pb2.Timings, launched_ns: int, read_ns: int) -> None:
        """Count all since the launch: the host only sees when a device has done everything."""
        timings.forward_us = (time.perf_counter_ns() - launched_ns) // 1000
