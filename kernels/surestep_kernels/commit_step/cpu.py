"""Committing a step in C."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from surestep_kernels.choose import Chosen
from surestep_kernels.columns.cpu.binding import CFunction, Library, struct, table_sizes
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows

from .reference import StopIds, report_width


def load(library: Library) -> dict[str, CFunction]:
    """Return the op."""
    run = library.short("commit_step", "6P 2l P")
    return {"commit_step": partial(commit_step, run)}


def commit_step(
    run: CFunction,
    rows: StepRows,
    drafts: DraftIds,
    chosen: Chosen,
    stops: StopIds,
    state: SlotState,
) -> Tensor:
    num_rows, num_drafts = drafts.ids.shape
    report = torch.empty(num_rows, report_width(num_drafts), dtype=torch.int32)
    structs = (struct(x) for x in (rows, drafts, chosen, stops, state))
    run(report.data_ptr(), *structs, num_rows, num_drafts, table_sizes(state, 1, 0))
    return report
