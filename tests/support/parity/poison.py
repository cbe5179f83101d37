"""Fills everything that belongs to nobody with values that would show in any output."""

from __future__ import annotations

import numpy as np
import torch
from surestep_common.invariants import NULL_BLOCK, IntArray
from surestep_kernels.slot_state import SlotState
from surestep_scheduler.core.state import SchedulerState
from surestep_worker.step.runner import Runner
from surestep_worker.step.step import StepLauncher

_BYTES = 0x7F7F7F7F  # as an id, a count or a length: far out of range


def poison_idle(runner: Runner, state: SchedulerState) -> None:
    """NaN into free pages and slots, NULL block and slot included; counters of slots out of range.

    Call between steps: what the scheduler holds to be free, no plan in flight touches.
    """
    parts = runner.context
    pages = [NULL_BLOCK, *state.pool._free]
    for layer in parts.caches.kv.layers:
        layer.k[pages] = torch.nan
        layer.v[pages] = torch.nan
    kv = parts.caches.kv
    kv.hidden.view(kv.num_blocks, kv.spec.block_size, kv.spec.kept_hidden)[pages] = torch.nan
    idle = np.flatnonzero(~parts.slots.occupied)
    if parts.caches.recurrent is not None:
        for tensor in parts.caches.recurrent.tensors():
            tensor[[*idle, parts.slots.num_slots]] = torch.nan
    if parts.caches.draft is not None:
        for tensor in parts.caches.draft.tensors():
            tensor[[*idle, *range(parts.slots.num_slots, len(tensor))]] = torch.nan  # or run ahead
    parts.slots.tokens[idle] = _BYTES
    for counter in ("committed", "known", "folded", "drafter_len", "prompt_len", "max_len"):
        getattr(parts.slots, counter)[idle] = _BYTES
    if isinstance(runner._launcher, StepLauncher):
        _poison_device(runner._launcher._memory.state, idle)


def _poison_device(state: SlotState, idle: IntArray) -> None:
    """The NULL slot keeps its length, which is 0."""
    state.tokens[[*idle, -1]] = _BYTES
    for counter in (state.committed, state.known, state.folded, state.drafter_len):
        counter[idle] = _BYTES
