"""Grammars in a step: they cut and add to its drafts, and mask its positions.

Where the host sees drafts before the pass, it settles the windows of rows with grammars first, so
that nothing is computed behind a draft that is barred. On other devices it fetches the drafts of
those rows while the pass runs, and masks the windows as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from surestep_common.invariants import Int32Array, IntArray
from surestep_kernels.shape_logits import Masks, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState
from surestep_kernels.step_columns import HostColumn
from surestep_proto import worker_pb2 as pb
from torch import Tensor

from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.grammar.table import GrammarTable
from surestep_worker.grammar.window import Ask, Window

from .batch import Extras, Geometry
from .plan import Rows
from .transfer import upload


@dataclass(frozen=True, slots=True)
class Guided:
    """What grammars make of a step of R rows."""

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

    def report(self, result: pb.StepResult) -> None:
        """Fill in which drafts were forced or looked up, and rows whose grammars are at fault."""
        if self.n_forced.any():
            result.n_forced.extend(self.n_forced.tolist())
        if self.n_looked_up is not None and self.n_looked_up.any():
            result.n_looked_up.extend(self.n_looked_up.tolist())
        for row, window in sorted(self.windows.items()):
            if window.fault and result.status[row] == pb.NO_CANDIDATE:
                result.grammar_fault_rows.append(row)
                result.grammar_faults.append(window.fault)


class Guidance:
    """Follows grammars on rank 0. Every rank calls the same methods."""

    def __init__(self, grammars: GrammarTable, state: SlotState, tp: TensorParallel) -> None:
        self._grammars, self._state, self._tp = grammars, state, tp
        self._dummy: Window | None = None

    def set_dummy(self, vocab_size: int | None) -> None:
        """Have the first row of each step masked with what bars nothing; None ends that."""
        self._dummy = None
        if vocab_size is not None:
            self._dummy = Window(masks=[np.full(-(-vocab_size // 32), -1, dtype=np.int32)])

    def concerns(self, rows: Rows) -> bool:
        """Whether any row that chooses tokens has a grammar."""
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
        return np.flatnonzero(rows.is_sampled & self._grammars.has(rows.slot))

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
