"""Sampling and verification as a step does them: the table of parameters, then the ops of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from surestep_kernels import load_kernels
from surestep_kernels.choose import Chosen
from surestep_kernels.commit_step import Report, StopIds
from surestep_kernels.shape_logits import Positions
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_worker.step.sampling import SamplingTable
from surestep_worker.step.transfer import upload
from torch import Tensor

OPS = load_kernels("cpu").step
_CPU = torch.device("cpu")


class Rows(NamedTuple):
    """Positions to sample, each a window of its own."""

    slot: Tensor  # i64[N]
    length: Tensor  # i64[N]
    tokens: Tensor  # i32[S, W]

    @property
    def window(self) -> Tensor:
        return torch.arange(len(self.slot), dtype=torch.int32)


def shape(z: Tensor, rows: Rows, table: SamplingTable) -> None:
    """Change the logits z f32[N, V] in place."""
    windows = np.arange(len(rows.slot), dtype=np.int32)
    shaping = upload(table.shaping(rows.slot.numpy(), windows), _CPU)
    where = Positions(rows.window, rows.slot.int(), rows.length.int(), rows.tokens)
    OPS.shape_logits(z, where, shaping)


def sample(
    logits: Tensor, slot: Tensor, length: Tensor, tokens: Tensor, table: SamplingTable
) -> Chosen:
    """Choose the token at index length[n] of slot[n], from logits[n] f32[N, V], unchanged."""
    rows, z = Rows(slot, length, tokens), logits.contiguous().clone()
    shape(z, rows, table)
    random, truncated = table.draw_flags(slot.numpy())
    draw = upload(table.draw(slot.numpy()), _CPU)
    return OPS.choose(z, rows.window, length.int(), draw, random=random, truncated=truncated)


def verify(
    chosen: Chosen, cu: Tensor, drafts: Tensor, counts: Tensor, slot: Tensor, table: SamplingTable
) -> Report:
    """What windows [V] of choices cu[w]:cu[w+1] emit, whose drafts are i64[V, K]; slots as asked.

    Every window has a line of a table of its own, as its slot may stand for many of them.
    """
    num, k = drafts.shape
    line = torch.arange(num).int()
    window = torch.repeat_interleave(line, counts + 1)
    zeros, cu = torch.zeros_like(line), cu.int()
    rows = StepRows(
        *(line, cu, zeros, zeros, zeros, zeros, zeros, line),
        *(window, window, torch.arange(len(window)).int() - cu[window.long()], cu),
    )
    tokens = torch.zeros(num + 1, k + 2).int()
    counters = (torch.zeros(num + 1).int() for _ in range(4))
    state = SlotState(tokens, torch.zeros(1, num + 1, 1).int(), *counters)
    stops: StopIds = upload(table.stops(slot.numpy()), _CPU)
    proposed = DraftIds(drafts.int(), counts.int())
    return Report.of(OPS.commit_step(rows, proposed, chosen, stops, state))
