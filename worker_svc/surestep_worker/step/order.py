"""Host's work before and behind the pass of a step: drafts, grammars and timings.

There is one order for each kind of device. Where the host sees drafts before the pass, it drafts
first and settles the windows of rows with grammars, so that nothing is computed behind a draft that
is barred. On other devices grammars fetch the drafts of their rows while the pass runs, and mask
the windows as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from surestep_common.invariants import Int32Array, IntArray
from surestep_kernels.shape_logits import Masks, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState
from surestep_kernels.step_columns import HostColumn
from surestep_kernels.write_runs import Runs
from surestep_proto import supervisor_pb2 as pb
from surestep_proto import worker_pb2
from torch import Tensor

from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.drafters.inputs import DraftInputs, DraftShape
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.grammar.window import Ask, Window

from .batch import Extras, Geometry
from .drafting import Drafted, Drafting
from .heartbeat import Phases
from .plan import Rows
from .sampling import SamplingTable
from .slots import SlotMemory, Slots
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
        phases: Phases,
        write: Callable[[Extras], None],
    ) -> None:
        """`write` applies the uploaded differences of a plan to the slots."""
        self._state, self._sampling, self._drafting = memory.state, sampling, drafting
        self._guidance, self._phases, self._write = guidance, phases, write

    def begin(self, rows: Rows, differences: Differences) -> Begun:
        """Draft, and settle the windows of rows with grammars."""
        extras: Extras[HostColumn] = Extras(differences)
        self._write(upload(extras, self._state.tokens.device))
        drafted = self._draft(rows)
        drafts, guided = self._guidance.settle(rows, drafted.drafts)
        guided = guided.with_lookups(drafts.counts, drafted.looked_up)
        rows = replace(rows, max_drafts=drafts.counts.long().numpy())
        return Begun(rows, None, drafted._replace(drafts=drafts), guided)

    def guided(self, begun: Begun, drafts: DraftIds) -> Guided:
        """Return what was settled."""
        assert begun.guided is not None
        return begun.guided

    def _draft(self, rows: Rows) -> Drafted:
        """Draft for the rows that draft or have to catch up."""
        proposes, looks_up = (rows.max_proposed > 0) | (rows.catch_up > 0), rows.max_looked_up > 0
        busy = proposes | looks_up
        if not busy.any():
            return self._drafting.nothing(len(rows))
        self._phases.enter(pb.DRAFTING)
        if proposes.any():
            drafted = self._propose(rows, np.flatnonzero(busy))
        else:
            drafted = self._drafting.look_up(rows.slot, rows.max_looked_up)
        self._phases.enter(pb.PREPARING)
        return drafted

    def _propose(self, rows: Rows, busy: IntArray) -> Drafted:
        """Draft with the drafter itself for the `busy` rows; it sees no others."""
        some, line = rows.take(busy), torch.from_numpy(rows.slot[busy])
        state, sampling, slot = self._state, self._sampling, some.slot
        behind = (state.committed[line] - state.drafter_len[line]).numpy()
        catch_up = np.minimum(some.catch_up, behind)
        shape = DraftShape(
            int(some.max_proposed.max()), int(catch_up.max()), *sampling.draw_flags(slot)
        )
        draw = sampling.draw(slot)
        head = self._drafting.head_inputs(slot, some.max_proposed, catch_up, draw)
        columns = slot, some.max_proposed, some.max_looked_up, catch_up
        inputs: DraftInputs[HostColumn] = DraftInputs._make(
            (*(column.astype(np.int32) for column in columns), head)
        )
        drafted = self._drafting.run(upload(inputs, state.tokens.device), shape)
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


@dataclass(frozen=True, slots=True)
class Guided:
    """Masks and drafts that grammars make of a step of R rows."""

    n_forced: IntArray  # [R] drafts that a grammar left no choice about
    windows: dict[int, Window] = field(default_factory=dict)  # by row; on the rank that chooses
    n_looked_up: IntArray | None = None  # [R] of the other drafts; None: nothing was looked up

    def with_lookups(self, counts: Tensor, looked_up: Tensor) -> Guided:
        """Return the same, given the drafts i32[R] of all rows, and of how many were looked up."""
        others = counts.numpy() - self.n_forced
        return replace(self, n_looked_up=np.minimum(looked_up.numpy(), others))

    def onto(self, extras: Extras, geometry: Geometry, device: torch.device) -> Extras:
        """Return `extras` with the masks of a step's positions, uploaded."""
        masks = self._masks(geometry)
        if masks is None:
            return extras
        sent = upload(Extras(shaping=Shaping(masks=masks)), device).shaping.masks
        return extras._replace(shaping=extras.shaping._replace(masks=sent))

    def _masks(self, geometry: Geometry) -> Masks[HostColumn] | None:
        """Return the masks of a step's positions, None if no position has one."""
        starts, which, words = geometry.rows.cu_windows, list[int](), list[Int32Array]()
        for row, window in self.windows.items():
            first = int(starts[geometry.rows.window[row]]) + window.first
            which += range(first, first + len(window.masks))
            words += window.masks
        return Masks(np.array(which, dtype=np.int32), np.stack(words)) if words else None

    def report(self, result: worker_pb2.StepResult) -> None:
        """Fill in which drafts were forced or looked up, and rows whose grammars are at fault."""
        if self.n_forced.any():
            result.n_forced.extend(self.n_forced.tolist())
        if self.n_looked_up is not None and self.n_looked_up.any():
            result.n_looked_up.extend(self.n_looked_up.tolist())
        for row, window in sorted(self.windows.items()):
            if window.fault and result.status[row] == worker_pb2.NO_CANDIDATE:
                result.grammar_fault_rows.append(row)
                result.grammar_faults.append(window.fault)


class Guidance:
    """Follows grammars on rank 0. Every rank calls the same methods."""

    def __init__(
        self, grammars: GrammarTable, slots: Slots, state: SlotState, tp: TensorParallel
    ) -> None:
        self._grammars, self._slots, self._state, self._tp = grammars, slots, state, tp
        self._dummy: Window | None = None

    def set_dummy(self, vocab_size: int | None) -> None:
        """Have the first row of each step masked with what bars nothing; None ends that."""
        self._dummy = None
        if vocab_size is not None:
            self._dummy = Window(masks=[np.full(-(-vocab_size // 32), -1, dtype=np.int32)])

    def concerns(self, rows: Rows) -> bool:
        """Return whether any row that chooses tokens has a grammar."""
        return bool(len(self._rows(rows)))

    def settle(self, rows: Rows, drafts: DraftIds) -> tuple[DraftIds, Guided]:
        """Return the drafts with which a step goes on, and what they are masked with.

        Of a row with a grammar they are at most `max_drafts`. The device is the host's.
        """
        chosen, windows = self._rows(rows), dict[int, Window]()
        n_forced = np.zeros(len(rows), dtype=np.int64)
        if not len(chosen):
            return drafts, Guided(n_forced)
        packed = torch.zeros(len(chosen), drafts.ids.shape[1] + 2, dtype=torch.int64)
        if self._tp.rank == 0:
            windows = self._windows(rows, chosen, drafts, rows.max_drafts[chosen].tolist())
            for line, row in enumerate(chosen.tolist()):
                window = windows[row]
                count = len(window.drafts)
                packed[line, :count] = torch.tensor(window.drafts, dtype=torch.int64)
                packed[line, -2], packed[line, -1] = count, window.num_forced
        packed = self._tp.broadcast(packed)
        ids, counts = drafts.ids.clone(), drafts.counts.clone()
        ids[chosen], counts[chosen] = packed[:, :-2].int(), packed[:, -2].int()
        n_forced[chosen] = packed[:, -1].numpy()
        return DraftIds(ids, counts), Guided(n_forced, windows)

    def follow(self, rows: Rows, drafts: DraftIds) -> Guided:
        """Return what windows with these drafts are masked with. Waits for the device."""
        chosen, windows = self._rows(rows), dict[int, Window]()
        if self._dummy is not None and rows.is_sampled[0]:
            windows[0] = self._dummy
        elif len(chosen) and self._tp.rank == 0:
            windows = self._windows(rows, chosen, drafts, [None] * len(chosen))
        return Guided(np.zeros(len(rows), dtype=np.int64), windows)

    def _rows(self, rows: Rows) -> IntArray:
        return np.flatnonzero(rows.is_sampled & self._slots.guided[rows.slot])

    def _windows(
        self, rows: Rows, chosen: IntArray, drafts: DraftIds, most: Sequence[int | None]
    ) -> dict[int, Window]:
        """Return the windows of the chosen rows, with at most so many drafts."""
        fetched = self._fetch(rows, chosen, drafts)
        slots = [int(rows.slot[row]) for row, _, _ in fetched]
        asks = [Ask(emitted, ids, m) for (_, emitted, ids), m in zip(fetched, most, strict=True)]
        found = self._grammars.windows(dict(zip(slots, asks, strict=True)))
        return {row: found[slot] for (row, _, _), slot in zip(fetched, slots, strict=True)}

    def _fetch(
        self, rows: Rows, chosen: IntArray, drafts: DraftIds
    ) -> list[tuple[int, list[int], list[int]]]:
        """Return of each chosen row the tokens that its grammar has not seen, and its drafts."""
        state, slot = self._state, rows.slot[chosen]
        device = state.tokens.device
        upto = np.array([self._grammars.upto(s) for s in slot.tolist()], dtype=np.int64)
        known = rows.len_hi[chosen] + np.where(rows.is_prefill, rows.num_tokens, 1)[chosen]
        width = max(int((known - upto).max()), 0)
        line, row = torch.from_numpy(slot).to(device), torch.from_numpy(chosen).to(device)
        place = torch.from_numpy(upto[:, None] + np.arange(width)).to(device)
        place = place.clamp(max=state.tokens.shape[1] - 1)
        parts = (
            state.known[line].unsqueeze(1),
            drafts.counts[row].unsqueeze(1),
            drafts.ids[row],
            state.tokens[line.unsqueeze(1), place],
        )
        fetched = torch.cat([part.long() for part in parts], dim=1).tolist()
        behind = 2 + drafts.ids.shape[1]
        return [
            (int(r), values[behind : behind + values[0] - int(u)], values[2 : 2 + values[1]])
            for r, u, values in zip(chosen, upto, fetched, strict=True)
        ]
